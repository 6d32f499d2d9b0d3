"""TextQueries: the attention of a model's text to each video row, recomputed from cached keys after a prefill.

HIPPO (arXiv 2601.08273): the mean over layers, heads and text rows of softmax(Q_text K_video^T / sqrt(d)). It is
recomputed, since attention kernels return no weights. The rotated queries of the text rows after the video are recorded
while these rows are prefilled; the rotated keys are in the cache.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vidspec_models.decoder.decoder import QueryObserver
from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache
from vidspec_models.prompt import Prompt

SoftmaxOver = Literal["video", "all"]  # attention is normalised over the video rows (HIPPO) or over all rows (SpecVLM)

_MAX_ROWS = 128  # the last rows of a long text contain the question
_KEYS_AT_ONCE = 1024
_SCORES_AT_ONCE = 2**22  # 16 MB
_SCORES_ON_A_GPU = 2**24  # a question about 32 frames of 14 x 14 in one go: 8 launches a layer instead of 80


class TextQueries:
    """For one prefill of one prompt. Chunks may split the text anywhere, but must come in order."""

    def __init__(self, prompt: Prompt, geometry: CacheGeometry, scale: float) -> None:
        """`geometry` is that of the caches that hold the prompt's keys; `scale` the attention's."""
        self._video_rows = prompt.is_video.nonzero()[:, 0]
        after_video = int(self._video_rows[-1]) + 1 if len(self._video_rows) else prompt.num_tokens
        self._first = max(after_video, prompt.num_tokens - _MAX_ROWS)
        self._spans = geometry.spans
        self._scale = scale
        self._noted: dict[int, list[Tensor]] = {index: [] for index in range(geometry.num_layers)}

    def observer(self, start: int, num_rows: int) -> QueryObserver | None:
        """The observer for the forward over prompt rows start..start+num_rows; None if none of them is needed."""
        if not any(self._noted.values()):
            self._first = max(self._first, start)  # rows reused from an earlier prompt are not computed again
        skipped = max(self._first - start, 0)
        if skipped >= num_rows:
            return None

        def note(layer: int, queries: Tensor) -> None:
            self._noted[layer].append(queries.clone())

        return QueryObserver(skipped, note)

    @torch.inference_mode()
    def relevance(self, cache: KVCache, softmax_over: SoftmaxOver) -> Tensor | None:
        """float32 [V]: mean over text rows, heads and layers: HIPPO's global semantic relevance, SpecVLM's score.

        None if there is no text or no video. `cache` must hold the rows of the prompt that was observed.
        """
        if not len(self._video_rows) or not all(self._noted.values()):
            return None
        queries = {layer: torch.cat(parts) for layer, parts in self._noted.items()}
        num_rows, num_heads = queries[0].shape[:2]
        layers_at_once = max(1, _SCORES_AT_ONCE // (num_rows * num_heads * _KEYS_AT_ONCE))
        sums = []
        for span in self._spans:
            for first in span.layers[::layers_at_once]:
                layers = range(first, min(first + layers_at_once, span.layers.stop))
                # One layer after another, small models would spend most of the time between the products.
                found = video_attention(
                    torch.cat([queries[layer] for layer in layers], 1),
                    cache.keys_of(layers),
                    self._video_rows.to(span.device),
                    first_row=self._first,
                    scale=self._scale,
                    among_video=softmax_over == "video",
                )
                sums.append(found.to(self._video_rows.device))
        return torch.cat(sums).sum(0) / (len(queries) * num_rows * num_heads)


def video_attention(
    queries: Tensor, keys: Tensor, video_rows: Tensor, *, first_row: int, scale: float, among_video: bool
) -> Tensor:
    """float32 [KV, V]: softmax weights of n text rows on the video rows, summed over rows and each key head's queries.

    queries [n, H, D] of cache rows first_row, first_row + 1, ...; keys [KV, rows, D], both with their rotary
    positions and maybe of several layers; video_rows int64 [V], all before first_row. The softmax is over the video
    rows alone or over all rows up to the query's own. Query head h reads key head h // (H / KV). Products are in the
    keys' type. Keys are processed 1024 at a time, on a GPU as many as make 2^24 scores; if there are more, in two
    passes: for the normaliser, then for the weights. No tensor exceeds [H, n, 1024], or 2^24 scores.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    at_once = _KEYS_AT_ONCE
    if keys.device.type != "cpu":
        at_once = max(at_once, _SCORES_ON_A_GPU // (num_rows * num_heads))
    grouped = (queries.float() * scale).view(num_rows, num_kv_heads, group, head_dim)
    grouped = grouped.transpose(0, 1).reshape(num_kv_heads, num_rows * group, head_dim).to(keys.dtype)

    def scores(rows: Tensor) -> Tensor:
        return (grouped @ keys.index_select(1, rows).mT).float()

    if among_video and len(video_rows) <= at_once:
        return scores(video_rows).softmax(-1).sum(1)
    own = torch.arange(first_row, first_row + num_rows, device=keys.device).repeat_interleave(group)[:, None]
    context = video_rows if among_video else torch.arange(first_row + num_rows, device=keys.device)
    normaliser = grouped.new_full((*grouped.shape[:2], 1), -torch.inf, dtype=torch.float32)
    for rows in context.split(at_once):
        seen = scores(rows).masked_fill_(rows > own, -torch.inf)
        normaliser = torch.logaddexp(normaliser, seen.logsumexp(-1, keepdim=True))
    return torch.cat([scores(rows).sub_(normaliser).exp_().sum(1) for rows in video_rows.split(at_once)], -1)
