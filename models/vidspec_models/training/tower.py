"""The vision tower: its features, the pixels it is trained on, and its own stage, the first.

The tower is trained on dense cell labels, and empty cells are kept free of scene content. Without this second loss, a
global ViT writes what it sees into background tokens (it "leaks"), and no study of token pruning on the pair would mean
anything. So each clip is also rendered without its things and letters, and the features of untouched patches must be
the same in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from transformers import SiglipVisionModel

from vidspec_models.bundled.render import OWNER_SIGN, render_with_owners
from vidspec_models.bundled.scene import CELL_SIDE, NUM_SLOTS, WORDS, Scene
from vidspec_models.training.architecture import PATCH_PX, PATCH_SIDE, build_tower
from vidspec_models.training.examples import IGNORE, Cells, Labels, find_cells, training_scene
from vidspec_models.training.optimiser import MuonWithAdamW, Workers
from vidspec_models.training.options import TrainOptions
from vidspec_models.training.stage_run import StageRun, load_part

_CLIPS = 8
_FRAMES_PER_CLIP = 3  # plus one empty frame
_LEAK_WEIGHT = 2.0
CELL_HEADS = {
    "kind": 3,
    **{name: len(WORDS[name]) for name in ("colour", "shape", "size", "region", "letter", "background", "texture")},
    "row": CELL_SIDE,
    "column": CELL_SIDE,
}
_HEAD_WEIGHTS = {"kind": 2.0, "shape": 2.0, "row": 0.2, "column": 0.2, "background": 0.5, "texture": 0.5}
_FEATURE_NOISE = 0.1  # of the features' standard deviation, so that faint traces are not learned


def tower_features(tower: SiglipVisionModel, pixels: torch.Tensor) -> torch.Tensor:
    """What LLaVA-OneVision reads: the last hidden state *before* the final layer norm, [N, 256, 192]."""
    features: torch.Tensor = tower.encoder(inputs_embeds=tower.embeddings(pixels)).last_hidden_state
    return features


class FrozenTower:
    """The tower of the finished stage; by default, it gives noisy features of augmented frames."""

    def __init__(self, options: TrainOptions) -> None:
        self.tower = build_tower(options.seed).to(options.device).eval().requires_grad_(False)
        self.tower.load_state_dict(load_part(options.work_dir, "tower", "tower"))
        self._bank = NoiseBank(options.device)
        self._run: Callable[[SiglipVisionModel, torch.Tensor], torch.Tensor] = (
            torch.compile(tower_features) if options.compile_models else tower_features
        )

    @torch.no_grad()
    def __call__(self, frames: torch.Tensor, generator: torch.Generator, *, is_noisy: bool = True) -> torch.Tensor:
        device = next(self.tower.parameters()).device
        if not is_noisy:
            return self._run(self.tower, normalise(frames.to(device)))
        features = self._run(self.tower, augment(frames.to(device), generator, self._bank))
        noise = self._bank.like(features, generator)
        return features.addcmul_(noise, features.std(dim=(0, 1)), value=_FEATURE_NOISE)


def normalise(frames: torch.Tensor) -> torch.Tensor:
    """uint8 frames [N, H, W, 3] to the tower's input [N, 3, H, W] in [-1, 1]."""
    return frames.permute(0, 3, 1, 2).float() / 127.5 - 1.0


class NoiseBank:
    """Normal noise drawn once and reused at random offsets: drawing it anew is a tenth of a training step on a CPU."""

    def __init__(self, device: str) -> None:
        self._values = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(device)

    def like(self, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Noise of a tensor's shape; a large tensor makes the bank repeat its values."""
        count = tensor.numel()
        if count > len(self._values) // 2:
            self._values = self._values.repeat(2 * count // len(self._values) + 1)
        start = int(torch.randint(len(self._values) - count, (1,), generator=generator))
        return self._values[start : start + count].view(tensor.shape)


def augment(frames: torch.Tensor, generator: torch.Generator, bank: NoiseBank) -> torch.Tensor:
    """Normalised pixels with mild noise, blur and brightness, so that H.264 and resizing do no harm."""
    pixels = normalise(frames)
    count, device = len(pixels), pixels.device

    def draw(low: float, high: float) -> torch.Tensor:
        values = torch.rand(count, 1, 1, 1, generator=generator) * (high - low) + low
        return values.to(device)

    blurred = torch.rand(count, generator=generator).to(device) < 0.4
    sharp = pixels[blurred]
    soft = F.avg_pool2d(F.pad(sharp, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    pixels[blurred] = sharp.lerp(soft, float(torch.rand(1, generator=generator)) * 0.5)
    noisy = (pixels * draw(0.94, 1.06) + draw(-0.05, 0.05)).addcmul_(bank.like(pixels, generator), draw(0.0, 0.04))
    return noisy.clamp_(-1.0, 1.0)


def train_tower(options: TrainOptions) -> None:
    """Run or resume the stage; the result is the part "tower" of its checkpoint."""
    device = torch.device(options.device)
    tower = build_tower(options.seed).to(device)
    # Linear probes on features pooled to visual tokens, one per label; not used after the stage.
    width = tower.config.hidden_size
    heads = nn.ModuleDict({name: nn.Linear(width, count) for name, count in CELL_HEADS.items()}).to(device)
    parts = {"tower": tower, "heads": heads}
    optimiser = MuonWithAdamW(parts, Workers(options.device, 1), matrix_lr=3e-3, other_lr=1.5e-3)
    run = StageRun("tower", options, {**parts, "optimiser": optimiser})
    features_of = torch.compile(tower_features) if options.compile_models else tower_features
    bank = NoiseBank(options.device)
    generator = torch.Generator().manual_seed(options.seed + 1000 * run.step)
    for _ in run.steps():
        batch = make_tower_batch(options.seed, run.clips_seen)
        run.clips_seen += _CLIPS
        features = features_of(tower, augment(batch.frames.to(device), generator, bank))
        full, empty = features[:-_CLIPS], features[-_CLIPS:]
        leak = leak_ratio(full, empty, batch.clear.to(device))
        losses, accuracies = head_losses(
            heads, full, {name: labels.to(device) for name, labels in batch.labels.items()}
        )
        loss = sum(losses, start=_LEAK_WEIGHT * leak)
        loss.backward()
        norm = optimiser.step(run.lr_scale)
        run.report(loss=float(loss.detach()), leak=float(leak.detach()), norm=norm, **accuracies)


def head_losses(
    heads: nn.ModuleDict, features: torch.Tensor, labels: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Weighted cross-entropies for features [N, 256, W] and labels [N, 64], and the accuracies worth reporting."""
    grid = features.view(-1, CELL_SIDE, 2, CELL_SIDE, 2, features.shape[-1])
    cells = grid.mean(dim=(2, 4)).flatten(1, 2)
    losses, accuracies = [], {}
    for name, head in heads.items():
        logits, truth = head(cells), labels[name]
        wrong = F.cross_entropy(logits.flatten(0, 1), truth.flatten(), ignore_index=IGNORE)
        losses.append(_HEAD_WEIGHTS.get(name, 1.0) * wrong)
        known = truth != IGNORE
        if name not in ("row", "column"):
            accuracies[name] = float((logits.argmax(-1)[known] == truth[known]).float().mean())
    return losses, accuracies


def leak_ratio(full: torch.Tensor, empty: torch.Tensor, clear: torch.Tensor) -> torch.Tensor:
    """Squared distance between untouched patches with and without content, in units of the features' variance."""
    reference = empty.repeat_interleave(full.shape[0] // empty.shape[0], dim=0)
    distance = (full - reference).square().mean(-1)
    spread = full.detach().var(dim=(0, 1)).mean() + 1e-6
    return (distance * clear).sum() / clear.sum() / spread


@dataclass(frozen=True, slots=True)
class TowerBatch:
    """Frames of clips, then one empty frame per clip; labels for the former only."""

    frames: torch.Tensor  # [C * F + C, 128, 128, 3] uint8
    labels: dict[str, torch.Tensor]  # [C * F, 64]
    clear: torch.Tensor  # [C * F, 256] untouched patches


def make_tower_batch(seed: int, clips_seen: int) -> TowerBatch:
    """The batch after `clips_seen` training clips; random times, so frames of every moment occur."""
    frames, empties, clear = [], [], []
    labels: dict[str, list[Labels]] = {name: [] for name in CELL_HEADS}
    for number in range(clips_seen, clips_seen + _CLIPS):
        scene = training_scene(seed, number)
        # One camera offset for the whole clip, so that one empty frame serves all of its frames.
        scene = replace(scene, shake_px=(scene.shake_px[0],) * NUM_SLOTS)
        times = np.random.default_rng([scene.seed, 17]).random(_FRAMES_PER_CLIP)
        pixels, owners = render_with_owners(scene, times)
        cells = find_cells(owners)
        for name, values in cell_labels(scene, times, cells).items():
            labels[name].append(values.reshape(_FRAMES_PER_CLIP, -1))
        frames.append(pixels)
        empties.append(render_with_owners(scene, times[:1], empty=True)[0])
        patches = owners.reshape(_FRAMES_PER_CLIP, PATCH_SIDE, PATCH_PX, PATCH_SIDE, PATCH_PX)
        clear.append(~(patches > 0).any(axis=(2, 4)).reshape(_FRAMES_PER_CLIP, -1))
    return TowerBatch(
        frames=torch.from_numpy(np.concatenate([*frames, *empties])),
        labels={name: torch.from_numpy(np.concatenate(values)) for name, values in labels.items()},
        clear=torch.from_numpy(np.concatenate(clear)).float(),
    )


def cell_labels(scene: Scene, times: NDArray[np.float64], cells: Cells) -> dict[str, Labels]:
    """One label array [T, 8, 8] per head of CELL_HEADS; IGNORE where a head has nothing to say."""
    labels = {name: np.full(cells.owner.shape, IGNORE, np.int64) for name in CELL_HEADS}
    labels["row"][:] = np.arange(CELL_SIDE)[None, :, None]
    labels["column"][:] = np.arange(CELL_SIDE)[None, None, :]
    labels["kind"][cells.is_clear] = 0
    for name, word in (("background", scene.background), ("texture", scene.texture)):
        labels[name][cells.is_clear] = WORDS[name].index(word)
    for t, time in enumerate(times):
        dx, dy = scene.shake_px[min(int(time * NUM_SLOTS), NUM_SLOTS - 1)]
        for index, thing in enumerate(scene.things):
            mine = cells.owner[t] == index + 1
            x, y = thing.centre_at(float(time))
            column, row = (min(max((v - 16) // 32, 0), 2) for v in (x + dx, y + dy))
            labels["kind"][t][mine] = 1
            labels["region"][t][mine] = row * 3 + column
            words = {"colour": thing.colour_at(float(time)), "shape": thing.shape, "size": thing.size}
            for name, word in words.items():
                labels[name][t][mine] = WORDS[name].index(word)
        for index, sign in enumerate(scene.signs):
            mine = cells.owner[t] == OWNER_SIGN + index
            labels["kind"][t][mine] = 2
            labels["letter"][t][mine] = WORDS["letter"].index(sign.letter)
    return labels
