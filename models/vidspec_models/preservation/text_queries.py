"""TextQueries: the attention of a model's text to each video row, recomputed from cached keys after a prefill.

HIPPO (arXiv 2601.08273): the mean over layers, heads and text rows of softmax(Q_text K_video^T / sqrt(d)). It is
recomputed, since attention kernels return no weights. The rotated queries of the text rows after the video are recorded
while these rows are prefilled; the rotated keys are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.decoder.decoder import QueryObserver
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.inputs import Prompt

_MOST_ROWS = 128  # the last rows of a long text contain the question
_KEYS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RelevanceLaw:
    """Which attention counts: normalised among video rows (HIPPO), or among all rows (SpecVLM)."""

    among_video: bool


class TextQueries:
    """For one prefill of one prompt. Chunks may split the text anywhere, but must come in order."""

    def __init__(self, prompt: Prompt, law: RelevanceLaw, num_layers: int, scale: float) -> None:
        self._video_rows = prompt.is_video.nonzero()[:, 0]
        after_video = int(self._video_rows[-1]) + 1 if len(self._video_rows) else prompt.num_tokens
        self._first = max(after_video, prompt.num_tokens - _MOST_ROWS)
        self._law = law
        self._scale = scale
        self._noted: dict[int, list[Tensor]] = {index: [] for index in range(num_layers)}

    def observer(self, start: int, num_rows: int) -> QueryObserver | None:
        """The observer for the forward over prompt rows start..start+num_rows; None if none of them is needed."""
        if not any(self._noted.values()):
            self._first = max(self._first, start)  # rows reused from an earlier prompt are not computed again
        skipped = max(self._first - start, 0)
        if skipped >= num_rows:
            return None

        def note(layer: int, queries: Tensor) -> None:
            self._noted[layer].append(queries[skipped:].clone())

        return note

    @torch.inference_mode()
    def relevance(self, cache: KVCache) -> Tensor | None:
        """float32 [V]: mean over text rows, heads and layers: HIPPO's global semantic relevance, SpecVLM's score.

        None if there is no text or no video. `cache` must hold the rows of the prompt that was observed.
        """
        if not len(self._video_rows) or not all(self._noted.values()):
            return None
        total: Tensor | None = None
        device = self._video_rows.device
        for layer, parts in self._noted.items():
            keys = cache.keys_of(layer)  # on the same device as the queries recorded for this layer
            weights = video_attention(
                torch.cat(parts),
                keys,
                self._video_rows.to(keys.device),
                first_row=self._first,
                scale=self._scale,
                among_video=self._law.among_video,
            ).to(device)
            total = weights if total is None else total.add_(weights)
        assert total is not None
        return (total / len(self._noted)).mean(0)


def video_attention(
    queries: Tensor, keys: Tensor, video_rows: Tensor, *, first_row: int, scale: float, among_video: bool
) -> Tensor:
    """float32 [n, V]: softmax weights of n text rows on the video rows, mean over the heads.

    queries [n, H, D] of cache rows first_row, first_row + 1, ...; keys [KV, rows, D], both with their rotary
    positions; video_rows int64 [V], all before first_row. The softmax is over the video rows alone or over all rows
    up to the query's own. Query head h reads key head h // (H / KV). Keys are processed 1024 at a time; if there are
    more, in two passes: for the normaliser, then for the weights. No tensor exceeds [H, n, 1024].
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    grouped = (queries.float() * scale).view(num_rows, num_kv_heads, group, head_dim)
    grouped = grouped.transpose(0, 1).reshape(num_kv_heads, num_rows * group, head_dim)

    def scores(rows: Tensor) -> Tensor:
        return grouped @ keys.index_select(1, rows).float().mT

    def mean_of_heads(weights: Tensor) -> Tensor:
        return weights.view(num_kv_heads, num_rows, group, -1).mean(2).mean(0)  # a single mean takes ten times as long

    if among_video and len(video_rows) <= _KEYS_AT_ONCE:
        return mean_of_heads(scores(video_rows).softmax(-1))
    own = torch.arange(first_row, first_row + num_rows, device=keys.device).repeat_interleave(group)[:, None]
    context = video_rows if among_video else torch.arange(first_row + num_rows, device=keys.device)
    normaliser = torch.full_like(grouped[..., :1], -torch.inf)
    for rows in context.split(_KEYS_AT_ONCE):
        seen = scores(rows).masked_fill_(rows > own, -torch.inf)
        normaliser = torch.logaddexp(normaliser, seen.logsumexp(-1, keepdim=True))
    parts = [mean_of_heads(scores(rows).sub_(normaliser).exp_()) for rows in video_rows.split(_KEYS_AT_ONCE)]
    return torch.cat(parts, -1)


@contextmanager
def using_threads(num_threads: int) -> Iterator[None]:
    """Inside, torch uses `num_threads` threads. It pays to leave out cores that other processes keep busy: a product
    waits for its slowest thread, and a small product spends nearly all of its time on that.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
