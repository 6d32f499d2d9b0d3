"""VideoLM: a loaded model as the engine drives it: prepare a prompt, prefill it in chunks, step many requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vidspec_models.decoder import Decoder, Segment
from vidspec_models.errors import ContextOverflow
from vidspec_models.families.base import Family
from vidspec_models.inputs import Prompt, Turn, Video
from vidspec_models.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """New rows of one sequence: `ids` go after the cache's rows; the first has rotary position `position`."""

    cache: KVCache
    ids: Sequence[int]
    position: int


class VideoLM:
    """One model on one device. Not thread-safe; keeps no state between calls but its weights."""

    def __init__(self, model: Any, processor: Any, family: Family, decoder: Decoder, stop_ids: frozenset[int]) -> None:
        self._model = model
        self._processor = processor
        self._family = family
        self.decoder = decoder
        self.stop_ids = stop_ids

    @property
    def context_length(self) -> int:
        return self.decoder.context_length

    @property
    def default_num_frames(self) -> int:
        return self._family.default_num_frames(self._processor)

    @torch.inference_mode()
    def prepare(self, turns: Sequence[Turn], videos: Sequence[Video]) -> Prompt:
        """Template, tokenise, run the vision tower. The costly part is the tower, once per video.

        Raises ContextOverflow, before that cost where the videos alone are too much.
        """
        family, model, processor = self._family, self._model, self._processor
        num_video_tokens = sum(family.num_video_tokens(model, processor, video) for video in videos)
        if num_video_tokens >= self.context_length:
            raise ContextOverflow(
                f"the video takes {num_video_tokens} tokens, the model's context is {self.context_length}; "
                "ask for fewer frames"
            )
        return family.prepare(model, processor, self.decoder, turns, videos)

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, cache: KVCache, num_rows: int) -> Tensor | None:
        """Append the prompt's next `num_rows` rows; on the last chunk return the logits [V] after the prompt."""
        start = cache.length
        stop = min(start + num_rows, prompt.num_tokens)
        cos, sin = prompt.rotary
        additions = prompt.layer_additions
        hidden = self.decoder.forward(
            prompt.embeddings[start:stop],
            (cos[start:stop], sin[start:stop]),
            [Segment(cache, start, stop - start)],
            () if additions is None else additions[:, start:stop].unbind(0),
        )
        cache.length = stop
        if stop < prompt.num_tokens:
            return None
        return self.decoder.logits(hidden[-1:])[0]

    @torch.inference_mode()
    def step(self, batch: Sequence[StepRows]) -> list[Tensor]:
        """Append every sequence's rows in one forward; returns logits [n_i, V] per sequence."""
        counts = [len(rows.ids) for rows in batch]
        ids = [token for rows in batch for token in rows.ids]
        positions = [rows.position + i for rows, count in zip(batch, counts, strict=True) for i in range(count)]
        ids_and_positions = torch.tensor((ids, positions), device=self.decoder.embedding.device)
        segments = [Segment(rows.cache, rows.cache.length, count) for rows, count in zip(batch, counts, strict=True)]
        hidden = self.decoder.forward(
            self.decoder.embed(ids_and_positions[0]), self.decoder.rotary(ids_and_positions[1]), segments
        )
        for rows, count in zip(batch, counts, strict=True):
            rows.cache.length += count
        return list(self.decoder.logits(hidden).split(counts))
