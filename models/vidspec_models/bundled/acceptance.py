"""How often the draft's choice is the target's, teacher-forced on the target's own captions, under several views.

The views are the leak test of the pair: background tokens must help (almost) as little as no tokens at all.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .architecture import VIDEO_TOKENS
from .labels import find_cells
from .loaded_pair import NUM_VISUAL, LoadedModel
from .questions import CAPTION_PROMPTS
from .render import render_with_owners, slot_times
from .scene import Scene

VIEWS = ("all", "none", "random10", "uniform10", "background10", "objects10")
_KEPT = NUM_VISUAL // 10


def view_mask(scene: Scene, view: str) -> NDArray[np.bool_]:
    """Which of the 512 visual tokens the draft sees; random views are fixed by the scene's seed."""
    rng = np.random.default_rng([scene.seed, 23])
    mask = np.zeros(NUM_VISUAL, np.bool_)
    if view == "all":
        return ~mask
    cells = find_cells(render_with_owners(scene, slot_times())[1])
    pools = {
        "none": np.zeros(0, np.int64),
        "random10": np.arange(NUM_VISUAL),
        "background10": np.flatnonzero(cells.is_strict_background.reshape(-1)),
        "objects10": np.flatnonzero(cells.owner.reshape(-1)),
    }
    if view == "uniform10":
        mask[np.linspace(0, NUM_VISUAL - 1, _KEPT).round().astype(int)] = True
    else:
        mask[rng.permutation(pools[view])[:_KEPT]] = True
    return mask


class AcceptanceCounter:
    """Adds up matches per view over batches of clips."""

    def __init__(self, draft: LoadedModel) -> None:
        self._draft = draft
        self._matches = dict.fromkeys(VIEWS, 0)
        self._tokens = 0

    def add(self, scenes: list[Scene], answers: list[list[int]]) -> None:
        """`answers` are the target's greedy captions for `CAPTION_PROMPTS[0]`."""
        asked = self._draft.packer.prompt_ids(CAPTION_PROMPTS[0])
        length = len(asked) + max(map(len, answers))
        ids = torch.zeros(len(scenes), length, dtype=torch.long)
        is_text = torch.zeros(len(scenes), length, dtype=torch.bool)
        for row, answer in enumerate(answers):
            ids[row, : len(asked) + len(answer)] = torch.tensor([*asked, *answer])
            is_text[row, : len(asked) + len(answer)] = True
        positions = (torch.arange(length) + len(self._draft.packer.prefix) + VIDEO_TOKENS).expand(len(scenes), -1)
        segments = torch.where(is_text, 1, -1)
        features = self._draft.features(self._draft.pixels(scenes))
        device = features.device
        text = (ids.to(device), positions.to(device), segments.to(device))
        self._tokens += sum(map(len, answers))
        for view in VIEWS:
            visible = torch.from_numpy(np.stack([view_mask(scene, view) for scene in scenes])).to(device)
            chosen = self._draft.packed_logits(features, text, visible).argmax(-1).cpu()
            for row, answer in enumerate(answers):
                span = slice(len(asked) - 1, len(asked) - 1 + len(answer))
                self._matches[view] += int((chosen[row, span] == torch.tensor(answer)).sum())

    def rates(self) -> dict[str, float]:
        return {view: self._matches[view] / max(self._tokens, 1) for view in VIEWS}
