"""Decoder: a language model without its layers: what is known of it, and who computes its prompts and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from vidspec_models.core_share import CoreShare
from vidspec_models.decoder.batch_invariant_ops import BatchInvariance
from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache
from vidspec_models.decoder.weights import DecoderWeights
from vidspec_models.errors import ContextOverflow
from vidspec_models.step_path import TORCH_OPERATORS

_MAX_STEP_ROWS = 64  # of a sequence; more rows are a prompt's, whose bits are never compared


class QueryObserver(NamedTuple):
    """Is given each layer's rotated queries of a call's rows from `first` on."""

    first: int
    note: Callable[[int, Tensor], None]  # layer index, queries [n - first, H, D]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence in a forward: cache rows start..start+num_rows are (over)written."""

    cache: KVCache
    start: int
    num_rows: int

    @property
    def is_of_prompt(self) -> bool:
        """Too many rows for a step."""
        return self.num_rows > _MAX_STEP_ROWS

    def rows(self) -> Sequence[Segment]:
        """Each row of a step as a segment of its own; a prompt's rows together."""
        if self.start == 0 or self.is_of_prompt:
            return (self,)
        return [Segment(self.cache, row, 1) for row in range(self.start, self.start + self.num_rows)]


class PromptRunner(Protocol):
    """What computes prompts: torch's operators, or kernels."""

    is_chunk_invariant: bool  # whether a prompt's rows have the same bits however the prompt is cut into chunks

    def prefill(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        segment: Segment,
        deepstack: Sequence[Tensor] = (),
        observer: QueryObserver | None = None,
        num_wanted: int = 1,
    ) -> Tensor:
        """Take a prompt's rows [n, hidden size] through all layers; returns the last `num_wanted` of them.

        Deepstack features and observer as in `TorchRunner.forward`.
        """

    def observe(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segment: Segment, observer: QueryObserver, num_layers: int
    ) -> None:
        """Call `observer` with the queries of the first `num_layers` layers, in which keys and values are written."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of rows [n, hidden size] that `prefill` has returned."""


class Decoder:
    """Made by `build_decoder`, with torch's operators for prompts and steps; kernels may take the place of either."""

    prompts: PromptRunner
    step: Callable[[Sequence[int], Sequence[int], list[Segment]], Tensor]
    """Logits [n, V] after token ids at plain rotary positions, rows in the order of the segments."""

    def __init__(
        self,
        weights: DecoderWeights,
        geometry: CacheGeometry,
        batch_invariance: BatchInvariance,
        num_heads: int,
        scale: float,
    ) -> None:
        """`num_heads` query heads; products of queries and keys are multiplied by `scale`."""
        self.weights = weights
        self.geometry = geometry
        self.batch_invariance = batch_invariance
        self.num_heads = num_heads
        self.scale = scale
        self.embedding = weights.embedding
        self.context_length = weights.rotary.shape[0]
        self.cores = CoreShare()
        self.dtype_name = str(geometry.dtype).removeprefix("torch.")  # replaced if the weights have another type
        self.step_path = TORCH_OPERATORS  # replaced if kernels compute the steps

    def prompt_rotary(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin of plain positions 0..num_tokens."""
        cos, sin = self.weights.rotary[:num_tokens].unbind(1)
        return cos, sin

    def require_room(self, num_tokens: int) -> None:
        """Raise ContextOverflow for a prompt that leaves no position to an answer."""
        if num_tokens >= self.context_length:
            raise ContextOverflow(
                f"the prompt has {num_tokens} tokens, but the model's context is {self.context_length}; "
                "shorten the prompt"
            )
