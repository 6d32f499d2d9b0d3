"""Batches for the language stages: frames, packed turns and dense truth of freshly rendered training clips."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from .architecture import CELLS
from .attributes import NUM_SLOTS
from .labels import STORY_HEADS, find_cells, story_labels
from .render import OWNER_SIGN, render_with_owners
from .scene import TRAIN_SEEDS, sample_scene
from .turns import PackedTurns, TurnPacker

_TIME_JITTER = 1 / 8  # of the time between two frames
_JOINT_OFFSET = 50_000_000  # clips of the language stages differ from those of the tower stage
_SEEDS_PER_RUN = 100_000_000
_LETTER_WORTH = 8.0  # few cells show a letter, and nothing else tells of it


@dataclass(frozen=True, slots=True)
class ClipBatch:
    """C clips of T frames, mostly 8; visual tokens are counted in frame order, without the newline."""

    frames: torch.Tensor  # [C * T, 128, 128, 3] uint8
    content: torch.Tensor  # [C, T * 64] bool: a thing or letter touches the cell
    worth: torch.Tensor  # [C, T * 64] float: 1 where a cell shows a thing, more where it shows a letter
    story: dict[str, torch.Tensor]  # [C, T * 64] labels
    ids: torch.Tensor  # [C, L], as all below
    positions: torch.Tensor
    segments: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    is_caption: torch.Tensor

    def to(self, device: torch.device) -> ClipBatch:
        """All but the frames, which the tower moves itself."""
        moved = {
            field.name: getattr(self, field.name).to(device)
            for field in fields(self)
            if field.name not in ("frames", "story")
        }
        story = {name: values.to(device) for name, values in self.story.items()}
        return ClipBatch(frames=self.frames, story=story, **moved)


def make_clip_batch(
    packer: TurnPacker, seed: int, clips: range, text_len: int, *, greedy_text: bool = False,
    num_frames: int = NUM_SLOTS,
) -> ClipBatch:  # fmt: skip
    """The training clips of these numbers; deterministic."""
    frames, content, worth, packed = [], [], [], []
    story: dict[str, list[np.ndarray]] = {name: [] for name in STORY_HEADS}
    for index in clips:
        scene = sample_scene(TRAIN_SEEDS.start + seed * _SEEDS_PER_RUN + _JOINT_OFFSET + index)
        rng = np.random.default_rng([scene.seed, 19])
        times = (np.arange(num_frames) + 0.5 + rng.uniform(-_TIME_JITTER, _TIME_JITTER, num_frames)) / num_frames
        pixels, owners = render_with_owners(scene, times)
        cells = find_cells(owners)
        frames.append(pixels)
        content.append(~cells.is_clear.reshape(num_frames * CELLS))
        worth.append(_worth(cells.owner.reshape(-1)))
        for name, values in story_labels(scene, times, cells).items():
            story[name].append(values.reshape(-1))
        packed.append(packer.pack(scene, text_len, rng, greedy_text=greedy_text))
    text = {
        field.name: torch.from_numpy(np.stack([getattr(turns, field.name) for turns in packed]))
        for field in fields(PackedTurns)
    }
    return ClipBatch(
        frames=torch.from_numpy(np.concatenate(frames)),
        content=torch.from_numpy(np.stack(content)),
        worth=torch.from_numpy(np.stack(worth)),
        story={name: torch.from_numpy(np.stack(values)) for name, values in story.items()},
        **text,
    )


def _worth(owner: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.where(owner >= OWNER_SIGN, _LETTER_WORTH, owner > 0).astype(np.float32)
