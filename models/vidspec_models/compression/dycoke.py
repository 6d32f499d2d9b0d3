"""DyCoke (arXiv 2411.15024): temporal token merging before the prompt, and rows of the prompt hidden while decoding.

**First stage.** Where frames repeat, the earlier tokens replace the later ones. Works on windows of four frames; the
last one may be shorter. The second frame is compared with the first and the fourth with the third, place by place; then
the third with the first. Of a compared frame, tokens stay that are least similar to their counterparts and to their
frame's mean (our addition). Nothing is averaged: merging means deleting.

**Second stage.** During decoding, later layers attend to few of the video rows. The paper selects anew for every row.
Here the rows of a period of `REFRESH_TOKENS` share one selection, made by the first of them, and no forward crosses
from one period into the next. So the rows hidden from a row depend only on the tokens up to the start of its period,
however many draft tokens are verified together.

Hidden rows can return without a second copy of any row: attention does not depend on the order of keys (their positions
are rotated into them). So later layers keep hidden rows in their first places and attend to the rest, one contiguous
part, which really reduces the memory that is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.compression import REFRESH_TOKENS, DyCoke
from vidspec_models.decoder.decoder import Decoder, QueryObserver, Segment
from vidspec_models.decoder.kv_cache import HiddenRows, KVCache
from vidspec_models.prompt import Prompt, cell_rows

_COMPARED_WITH = (0, 1, 2, 1)  # by place in the window: how many frames back; the first frame stays whole
_DECIMALS = 5  # further digits of equal tokens' similarities are rounding errors, which differ between machines
_ROUNDING = 1e-9  # (1 - 0.9) * 10 is slightly below 1 in floating point
_STILL_ALIKE = 0.9  # threshold of the paper's gate


def temporal_token_merging(features: Tensor, merge_ratio: float) -> Tensor:
    """Which tokens of a video stay: bool [F, M] for projected features [F, M, hidden size].

    Of every compared frame the floor((1 - K) * M) least expendable tokens stay; of equal ones the first.
    """
    num_frames, num_tokens = features.shape[:2]
    kept = torch.ones(num_frames, num_tokens, dtype=torch.bool, device=features.device)
    count = num_left(num_tokens, merge_ratio)
    for frame in range(num_frames):
        earlier = compared_with(frame)
        if earlier != frame:
            found = expendable(features[frame].float(), features[earlier].float())
            kept[frame, found.round(decimals=_DECIMALS).argsort(stable=True)[count:]] = False
    return kept


def num_left(count: int, ratio: float) -> int:
    """Number of tokens left if a share `ratio` of `count` tokens is removed, rounded down."""
    return floor((1 - ratio) * count + _ROUNDING)


def compared_with(frame: int) -> int:
    """The frame whose tokens may replace this frame's; the frame itself if it is the first of a window."""
    return frame - _COMPARED_WITH[frame % len(_COMPARED_WITH)]


def expendable(frame: Tensor, earlier: Tensor) -> Tensor:
    """float [M]: each token's cosine with its counterpart plus its cosine with the mean of its frame [M, hidden size].

    The paper has only the first term. With it alone an object that stands still is deleted as readily as the background
    behind it, and nothing in these frames shows any more that it is still there (docs/methods.md).
    """
    repeated = functional.cosine_similarity(frame, earlier, dim=-1)
    ordinary = functional.cosine_similarity(frame, frame.mean(0, keepdim=True), dim=-1)
    return repeated + ordinary


@dataclass(frozen=True, slots=True)
class KVPruner:
    """The fixed part of a request's pruning; the rows hidden at the moment are part of its cache."""

    candidates: Tensor  # int64 [C]: prompt rows that are cells of a frame
    num_hidden: int
    first_layer: int
    num_prompt_rows: int

    @classmethod
    def of(cls, prompt: Prompt, dycoke: DyCoke, num_layers: int) -> KVPruner | None:
        """None if nothing would ever be hidden: too little video, P = 0, or a model with at most L layers."""
        candidates = prompt.is_video.nonzero()[:, 0][cell_rows(prompt)]
        num_hidden = len(candidates) - max(1, num_left(len(candidates), dycoke.hide_ratio))
        if num_hidden <= 0 or dycoke.layer >= num_layers:
            return None
        return cls(candidates, num_hidden, dycoke.layer, prompt.num_tokens)

    def num_rows_left(self, cache_length: int) -> int:
        """The most rows that the next forward may have to stay within a period, for a cache of this length."""
        return REFRESH_TOKENS - (cache_length - self.num_prompt_rows) % REFRESH_TOKENS

    def refresh(self, decoder: Decoder, cache: KVCache, token: int, position: int) -> None:
        """Call before a forward whose first row is `token`: if the row begins a period, choose the rows to hide.

        Costs the first L layers for one row. The cache must hold the whole prompt.
        """
        if (cache.length - self.num_prompt_rows) % REFRESH_TOKENS:
            return
        attention = self._attention(decoder, cache, token, position)
        if cache.hidden is not None and still_stands(attention, cache.hidden.attention):
            return
        hidden = self.candidates[hidden_by(attention, self.num_hidden)]
        if cache.hidden is None:
            begin_hiding(cache, hidden, self.first_layer, int(self.candidates[-1]) + 1, attention)
        else:
            change_hidden(cache, cache.hidden, hidden, attention)

    def _attention(self, decoder: Decoder, cache: KVCache, token: int, position: int) -> Tensor:
        """The row's attention to each candidate in the layer before the first pruned one."""
        device = decoder.embedding.device
        seen: dict[int, Tensor] = {}
        decoder.prompts.observe(
            *decoder.weights.rows(torch.tensor([token], device=device), torch.tensor([position], device=device)),
            Segment(cache, cache.length, 1),
            QueryObserver(0, seen.__setitem__),
            self.first_layer,
        )
        layer = self.first_layer - 1
        keys = cache.keys_of(range(layer, self.first_layer))[:, : cache.length + 1]
        return attention_of_row(seen[layer][0], keys, decoder.scale).to(self.candidates.device)[self.candidates]


def attention_of_row(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """softmax(q k / sqrt(D)) of one row over all rows that it sees, mean over heads: float32 [n].

    queries [H, D]; keys [KV, n, D], the row's own included; query head h reads key head h // (H / KV).
    """
    num_kv_heads = keys.shape[0]
    grouped = queries.float().unflatten(0, (num_kv_heads, -1))
    scores = torch.einsum("kgd,knd->kgn", grouped, keys.float()) * scale
    return scores.softmax(-1).mean((0, 1))


def hidden_by(attention: Tensor, count: int) -> Tensor:
    """Indices of the `count` candidates with the least attention, ascending; of equal ones the last."""
    order = attention.argsort(descending=True, stable=True)
    return order[len(attention) - count :].sort().values


def still_stands(attention: Tensor, chosen_by: Tensor) -> bool:
    """The paper's gate: whether attention [candidates] is still similar to the one behind the current selection."""
    return bool(functional.cosine_similarity(attention, chosen_by, dim=0) >= _STILL_ALIKE)


def begin_hiding(cache: KVCache, hidden: Tensor, first_layer: int, span: int, attention: Tensor) -> None:
    """Hide rows (int64, sorted) of the first `span` rows in layers from `first_layer` on; `attention` chose them."""
    places = torch.arange(span, device=hidden.device)
    state = HiddenRows(first_layer, len(hidden), places, attention)
    _move(cache, state, places.clone(), torch.cat((hidden, places[~torch.isin(places, hidden)])))
    cache.hidden = state


def change_hidden(cache: KVCache, state: HiddenRows, hidden: Tensor, attention: Tensor) -> None:
    """Hide these rows instead of the current ones: the same number, within the same span."""
    is_wanted = torch.isin(state.order, hidden)
    is_hidden = torch.arange(len(state.order), device=hidden.device) < state.count
    returning = (is_hidden & ~is_wanted).nonzero()[:, 0]
    leaving = (~is_hidden & is_wanted).nonzero()[:, 0]
    _move(cache, state, torch.cat((returning, leaving)), torch.cat((leaving, returning)))
    state.attention = attention


def _move(cache: KVCache, state: HiddenRows, to: Tensor, source: Tensor) -> None:
    """Copy rows from places `source` to places `to`; one is a permutation of the other."""
    first = 0  # first layer of the span
    for pair in zip(cache.keys_by_span, cache.values_by_span, strict=True):
        for stored in pair:
            there, whence = to.to(stored.device), source.to(stored.device)
            layers = stored[max(0, state.first_layer - first) :]
            layers[:, :, :, there] = layers[:, :, :, whence]
        first += len(pair[0])
    state.order[to] = state.order[source]
