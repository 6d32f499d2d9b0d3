"""TokenChoice: which of a video's tokens the target's prompt has, where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vidspec_models.compression import DEFAULT_RATIO, DyCoke, merge_ratio_of, ratio_of
from vidspec_models.compression.frame_budgets import v_cast, vidcom2
from vidspec_models.compression.merging import merge_frames
from vidspec_models.encoder_cache import EncodedVideo, joined
from vidspec_models.inputs import NO_CELL
from vidspec_models.request import Compression

Choose = Callable[[Tensor], Tensor]  # features of a video [F, M, hidden size] -> which tokens stay, bool [F, M]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """Of each video by itself. Text, rows that are no cell of a frame (newlines) and videos of one frame stay whole."""

    method: str
    ratio: float  # of a video's tokens the share that stays, about
    choose: Choose | None = None  # None: the vision tower does, while it merges frames

    def of(self, video: EncodedVideo) -> EncodedVideo:
        """The video without the rows that are not chosen; itself where all are."""
        if self.choose is None or video.num_frames < 2:
            return video
        device, cells = video.features.device, (video.grid != NO_CELL).all(1)
        features = video.features if bool(cells.all()) else video.features[cells.to(device)]
        kept = torch.ones_like(cells)
        kept[cells] = self.choose(features.unflatten(0, (video.num_frames, -1))).flatten().to(kept.device)
        return video if bool(kept.all()) else video.only(kept.to(device))

    def in_stretches(self, parts: Iterator[EncodedVideo], most: int) -> EncodedVideo:
        """The same of a video that is never there as a whole: as many of its parts as have `most` rows are chosen from
        at a time, and of each of these stretches the chosen rows are kept. A last part of one frame, which would stay
        whole, belongs to the stretch before it.
        """
        chosen, stretch = list[EncodedVideo](), list[EncodedVideo]()
        for part in parts:
            if stretch and part.num_frames > 1 and sum(len(each.features) for each in (*stretch, part)) > most:
                chosen.append(self._of_all(stretch))
            stretch.append(part)
        chosen.append(self._of_all(stretch))
        return joined(chosen)

    def _of_all(self, parts: list[EncodedVideo]) -> EncodedVideo:
        """With its `stays`, whatever is chosen: other stretches have theirs. Empties the list, which may be large."""
        whole = joined(parts)
        parts.clear()
        chosen = self.of(whole)
        return chosen if chosen.stays is not None else chosen.only(torch.ones(len(chosen.features), dtype=torch.bool))


def token_choice(compression: Compression, ratio: float | None, dycoke: DyCoke) -> TokenChoice | None:
    """The method that was asked for and its `ratio` of tokens that stay; None where all of a prompt's do.

    Without a ratio DyCoke merges by its own K. EarlyTom merges whatever the ratio.
    """
    if compression is Compression.NONE or (ratio == 1 and compression is not Compression.EARLYTOM):
        return None
    share, choose = ratio or DEFAULT_RATIO, None
    if compression is Compression.V_CAST:
        choose = partial(v_cast, ratio=share)
    elif compression is Compression.VIDCOM2:
        choose = partial(vidcom2, ratio=share)
    elif compression is Compression.DYCOKE:
        merge_ratio = dycoke.merge_ratio if ratio is None else merge_ratio_of(ratio)
        share, choose = ratio_of(merge_ratio), partial(merge_frames, merge_ratio=merge_ratio)
    return TokenChoice(method=compression.value, ratio=share, choose=choose)
