"""TokenSelector: which of a video's tokens the target's prompt keeps, for requests with compression."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vidspec_models.compression import DEFAULT_RATIO, DyCoke
from vidspec_models.compression.dycoke import temporal_token_merging
from vidspec_models.compression.frame_budgets import v_cast, vidcom2
from vidspec_models.encoder_cache import EncodedVideo, concatenated
from vidspec_models.prompt import NO_CELL
from vidspec_models.request import Compression

_COMPARED = 3 / 4  # share of DyCoke's frames that are compared with an earlier frame; the others always stay whole
_MAX_MERGED = 0.99
SelectTokens = Callable[[Tensor], Tensor]  # features of a video [F, M, hidden size] -> which tokens stay, bool [F, M]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSelector:
    """Chooses per video. Text, rows that are not cells of a frame (newlines) and videos of one frame stay whole."""

    method: str
    ratio: float  # approximate share of a video's tokens that stays
    select: SelectTokens | None = None  # None: the vision tower chooses while it merges frames

    def apply(self, video: EncodedVideo) -> EncodedVideo:
        """The video with only the chosen rows; the same object if all rows are chosen."""
        if self.select is None or video.num_frames < 2:
            return video
        device, cells = video.features.device, (video.grid != NO_CELL).all(1)
        features = video.features if bool(cells.all()) else video.features[cells.to(device)]
        kept = torch.ones_like(cells)
        kept[cells] = self.select(features.unflatten(0, (video.num_frames, -1))).flatten().to(kept.device)
        return video if bool(kept.all()) else video.only(kept.to(device))

    def apply_in_parts(self, parts: Iterator[EncodedVideo], most: int) -> EncodedVideo:
        """Like `apply`, for a video that is never in memory as a whole: chooses from successive parts with together at
        most `most` rows at a time, and keeps only the chosen rows. A last part of one frame would stay whole by itself,
        so it is added to the parts before it.
        """
        chosen, stretch = list[EncodedVideo](), list[EncodedVideo]()
        for part in parts:
            if stretch and part.num_frames > 1 and sum(len(each.features) for each in (*stretch, part)) > most:
                chosen.append(self._of_all(stretch))
            stretch.append(part)
        chosen.append(self._of_all(stretch))
        return concatenated(chosen)

    def _of_all(self, parts: list[EncodedVideo]) -> EncodedVideo:
        """Choose from these parts together. Empties the list to free memory. The result always has a `kept_mask`, which
        `concatenated` needs.
        """
        whole = concatenated(parts)
        parts.clear()
        chosen = self.apply(whole)
        if chosen.kept_mask is None:
            return chosen.only(torch.ones(len(chosen.features), dtype=torch.bool))
        return chosen


def token_selector(compression: Compression, ratio: float | None, dycoke: DyCoke) -> TokenSelector | None:
    """The requested method with a share `ratio` of tokens to keep; None if all tokens stay.

    Without a ratio DyCoke uses its own K. EarlyTom merges frames whatever the ratio, even 1.
    """
    if compression is Compression.NONE or (ratio == 1 and compression is not Compression.EARLYTOM):
        return None
    share, select = ratio or DEFAULT_RATIO, None
    if compression is Compression.V_CAST:
        select = partial(v_cast, ratio=share)
    elif compression is Compression.VIDCOM2:
        select = partial(vidcom2, ratio=share)
    elif compression is Compression.DYCOKE:
        merge_ratio = dycoke.merge_ratio if ratio is None else min((1 - ratio) / _COMPARED, _MAX_MERGED)
        share, select = 1 - _COMPARED * merge_ratio, partial(temporal_token_merging, merge_ratio=merge_ratio)
    return TokenSelector(method=compression.value, ratio=share, select=select)
