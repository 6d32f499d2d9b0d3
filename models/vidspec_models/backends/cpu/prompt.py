"""CpuPrompt: a prompt's rows through all layers in compiled kernels, with blocks of rows in parallel on threads.

The kernels are those of a step, so a row's bits do not depend on how a prompt is cut into chunks and blocks. Measured
with AVX2 and AVX-512 (docs/benchmark-log.md), they save torch's time between products, in int8 nearly half of the
products' time, and in bfloat16 a sixth of all time on Zen 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vidspec_models.backends.cpu.forward import Blocks, num_settled_after
from vidspec_models.backends.cpu.layer_halves import Rows
from vidspec_models.backends.cpu.packing import Array, as_array
from vidspec_models.backends.cpu.segments import KEPT, described, note_columns
from vidspec_models.backends.cpu.step import CpuStep
from vidspec_models.backends.cpu.team import Team
from vidspec_models.decoder.decoder import QueryObserver, Segment
from vidspec_models.decoder.kv_cache import KVCache

_MAX_ROWS, _MIN_ROWS = 64, 24  # per block: intermediate results stay in a core's cache


class _Prompt(NamedTuple):
    """Rows on their way through the layers."""

    rows: Rows
    tables: Array  # [n, 2, D]
    segments: Array  # see `segments`
    edges: list[int]  # of blocks
    deepstack: Array  # [layers, n, E]


class CpuPrompt:
    """Uses torch's number of threads at the time of the call, shared with other computing threads of the worker; the
    remaining cores belong to another worker.
    """

    is_chunk_invariant = True

    def __init__(self, step: CpuStep) -> None:
        """Uses the weights of `step`."""
        self._step = step
        self._team = Team(1)
        geometry, size = step.decoder.geometry, step.decoder.embedding.shape[1]
        nowhere = torch.zeros(2, 1, 1, geometry.head_dim)
        # Compiles the kernel, or loads it from the cache of an earlier start.
        self.prefill(torch.zeros(1, size), (nowhere[0], nowhere[1]), Segment(KVCache(geometry, 1), 0, 1))

    def prefill(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        segment: Segment,
        deepstack: Sequence[Tensor] = (),
        observer: QueryObserver | None = None,
        num_wanted: int = 1,
    ) -> Tensor:
        """As `PromptRunner.prefill`."""
        prompt = self._prompt(hidden, rotary, segment, deepstack)
        last, num_rows = len(self._step.weights.mlp_norm) - 1, len(prompt.tables)
        self._project(prompt, range(last + 1), observer)
        first = num_rows - num_wanted  # the last layer computes only wanted rows
        edges = [first, *(edge for edge in prompt.edges if edge > first)]
        if num_wanted:
            self._run(prompt, edges, range(2 * last + 1, 2 * last + 2))
        prompt.segments[0, KEPT] = num_settled_after(prompt.segments)
        note_columns([segment], prompt.segments)
        return torch.from_numpy(prompt.rows.hidden[first:])

    def observe(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segment: Segment, observer: QueryObserver, num_layers: int
    ) -> None:
        """As `PromptRunner.observe`."""
        self._project(self._prompt(hidden, rotary, segment, ()), range(num_layers), observer)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `PromptRunner.logits`."""
        return self._step.logits(hidden)

    def _prompt(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segment: Segment, deepstack: Sequence[Tensor]
    ) -> _Prompt:
        return _Prompt(
            rows=self._step.rows_of(as_array(hidden.to(torch.float32, copy=True))),
            tables=as_array(torch.cat(rotary, 1)),
            segments=described([segment]),
            edges=_edges(len(hidden), torch.get_num_threads()),
            deepstack=as_array(torch.stack(list(deepstack))) if deepstack else np.empty((0, *hidden.shape), np.float32),
        )

    def _project(self, prompt: _Prompt, layers: range, observer: QueryObserver | None) -> None:
        """Take the rows through all layers but the last one, of which queries, keys and values are computed."""
        noted = None
        if observer is not None:
            num_noted = max(len(prompt.tables) - observer.first, 0)
            noted = np.empty((len(layers), num_noted, *prompt.rows.mixed.shape[1:]), np.float32)
        self._run(prompt, prompt.edges, range(2 * len(layers) - 1), noted)
        if observer is not None and noted is not None:
            for layer, queries in zip(layers, noted, strict=True):
                observer.note(layer, torch.from_numpy(queries))

    def _run(self, prompt: _Prompt, edges: Sequence[int], halves: range, noted: Array | None = None) -> None:
        """Compute halves of layers for the rows from the first edge to the last."""
        rows, tables, segments = prompt.rows, prompt.tables, prompt.segments
        if noted is None:
            noted = np.empty((0, 0, *rows.mixed.shape[1:]), np.float32)
        blocks = Blocks(np.array(edges), noted, prompt.deepstack)
        cores = self._step.decoder.cores
        num_threads = min(cores.most_threads, len(edges) - 1)
        if num_threads > self._team.size:
            self._team = Team(num_threads)
        # If another process may use a core for some time, this is over long before most prompts are.
        self._team.run(
            num_threads,
            lambda member: self._step.run(member, rows, tables, segments, halves, blocks=blocks),
            late_s=cores.lent_s,
        )


def _edges(num_rows: int, num_threads: int) -> list[int]:
    """Edges of blocks of about equal size, the same number for each thread if there are enough rows."""
    count = -(-num_rows // (_MAX_ROWS * num_threads)) * num_threads
    count = max(1, min(count, num_rows // _MIN_ROWS))
    return [num_rows * number // count for number in range(count + 1)]
