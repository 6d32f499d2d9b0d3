"""Stage A: the vision tower alone, taught by dense cell labels, with empty cells kept free of scene content.

Without the independence term a global ViT writes what it sees into background tokens (it "leaks"), and no study
of token pruning on the pair would mean anything. So each clip is also rendered without its things and letters,
and the features of untouched patches must be the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import SiglipVisionModel

from .architecture import CELL_SIDE, PATCH_SIDE, build_tower
from .attention import register
from .attributes import NUM_SLOTS
from .augment import NoiseBank, augment
from .labels import CELL_HEADS, IGNORE, Labels, cell_labels, find_cells
from .muon import MuonWithAdamW
from .options import TrainOptions
from .render import render_with_owners
from .scene import TRAIN_SEEDS, sample_scene
from .stage_run import StageRun

_CLIPS = 8
_FRAMES_PER_CLIP = 3  # plus one empty frame
_LEAK_WEIGHT = 2.0
_HEAD_WEIGHTS = {"kind": 2.0, "shape": 2.0, "row": 0.2, "column": 0.2, "background": 0.5, "texture": 0.5}


class CellHeads(nn.Module):
    """Linear probes on pooled tower features, one per label; thrown away after the stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.ModuleDict({name: nn.Linear(width, count) for name, count in CELL_HEADS.items()})

    def forward(self, cells: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: head(cells) for name, head in self.head.items()}


@dataclass(frozen=True, slots=True)
class TowerBatch:
    """Frames of clips, then one empty frame per clip; labels for the former only."""

    frames: torch.Tensor  # [C * F + C, 128, 128, 3] uint8
    labels: dict[str, torch.Tensor]  # [C * F, 64]
    clear: torch.Tensor  # [C * F, 256] untouched patches


def tower_features(tower: SiglipVisionModel, pixels: torch.Tensor) -> torch.Tensor:
    """What LLaVA-OneVision reads: the last hidden state *before* the final layer norm, [N, 256, 192]."""
    features: torch.Tensor = tower.encoder(inputs_embeds=tower.embeddings(pixels)).last_hidden_state
    return features


def pool_cells(features: torch.Tensor) -> torch.Tensor:
    """2x2 mean of patch features: [N, 256, W] to [N, 64, W]."""
    grid = features.view(-1, CELL_SIDE, 2, CELL_SIDE, 2, features.shape[-1])
    return grid.mean(dim=(2, 4)).flatten(1, 2)


def train_tower(options: TrainOptions) -> None:
    """Run or resume the stage; the result is the part "tower" of its checkpoint."""
    device = torch.device(options.device)
    tower = build_tower(options.seed).to(device)
    tower.set_attn_implementation(register())
    heads = CellHeads(tower.config.hidden_size).to(device)
    both = nn.ModuleDict({"tower": tower, "heads": heads})
    optimiser = MuonWithAdamW(both, matrix_lr=3e-3, other_lr=1.5e-3)
    run = StageRun("tower", options, {"tower": tower, "heads": heads, "optimiser": optimiser})
    features_of = torch.compile(tower_features) if options.compile_models else tower_features
    bank = NoiseBank(options.device)
    generator = torch.Generator().manual_seed(options.seed + 1000 * run.step)
    for _ in run.steps():
        batch = make_tower_batch(options.seed, run.clips_seen)
        run.clips_seen += _CLIPS
        features = features_of(tower, augment(batch.frames.to(device), generator, bank))
        full, empty = features[:-_CLIPS], features[-_CLIPS:]
        leak = leak_ratio(full, empty, batch.clear.to(device))
        loss = _LEAK_WEIGHT * leak
        accuracies = {}
        for name, logits in heads(pool_cells(full)).items():
            labels = batch.labels[name].to(device)
            wrong = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
            loss = loss + _HEAD_WEIGHTS.get(name, 1.0) * wrong
            known = labels != IGNORE
            if name not in ("row", "column"):
                accuracies[name] = float((logits.argmax(-1)[known] == labels[known]).float().mean())
        loss.backward()
        norm = optimiser.step(run.lr_scale)
        run.report(loss=float(loss), leak=float(leak), norm=norm, **accuracies)


def leak_ratio(full: torch.Tensor, empty: torch.Tensor, clear: torch.Tensor) -> torch.Tensor:
    """Squared distance between untouched patches with and without content, in units of the features' variance."""
    reference = empty.repeat_interleave(full.shape[0] // empty.shape[0], dim=0)
    distance = (full - reference).square().mean(-1)
    spread = full.detach().var(dim=(0, 1)).mean() + 1e-6
    return (distance * clear).sum() / clear.sum() / spread


def make_tower_batch(seed: int, clips_seen: int) -> TowerBatch:
    """The batch after `clips_seen` training clips; random times, so frames of every moment occur."""
    frames, empties, clear = [], [], []
    labels: dict[str, list[Labels]] = {name: [] for name in CELL_HEADS}
    for index in range(clips_seen, clips_seen + _CLIPS):
        scene = sample_scene(TRAIN_SEEDS.start + seed * 100_000_000 + index)
        # One camera offset for the whole clip, so that one empty frame serves all of its frames.
        scene = replace(scene, shake_px=(scene.shake_px[0],) * NUM_SLOTS)
        times = np.random.default_rng([scene.seed, 17]).random(_FRAMES_PER_CLIP)
        pixels, owners = render_with_owners(scene, times)
        cells = find_cells(owners)
        for name, values in cell_labels(scene, times, cells).items():
            labels[name].append(values.reshape(_FRAMES_PER_CLIP, -1))
        frames.append(pixels)
        empties.append(render_with_owners(scene, times[:1], empty=True)[0])
        patches = owners.reshape(_FRAMES_PER_CLIP, PATCH_SIDE, 8, PATCH_SIDE, 8)
        clear.append(~(patches > 0).any(axis=(2, 4)).reshape(_FRAMES_PER_CLIP, -1))
    return TowerBatch(
        frames=torch.from_numpy(np.concatenate([*frames, *empties])),
        labels={name: torch.from_numpy(np.concatenate(values)) for name, values in labels.items()},
        clear=torch.from_numpy(np.concatenate(clear)).float(),
    )
