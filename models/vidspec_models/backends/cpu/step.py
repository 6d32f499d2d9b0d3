"""CpuStep: a model's decoding step on a CPU in compiled kernels, with all rows through all layers in one call.

A row's values come from the same chain of operations whatever the number of rows in the step. A step of few rows reads
every weight once and is bound by memory bandwidth; with more rows it is bound by arithmetic, and processors that
multiply bfloat16 may be twice as fast with it. Prompts use the same kernels where that is known to be faster than torch
(see `prompt`).

There are three arithmetics, selected by the arrays' types when a kernel is compiled. In *float32* all operands are
float32. In *bfloat16* (uint16 arrays; only if the processor multiplies it) the operands of products, queries, keys and
values are rounded to bfloat16; everything else, above all every sum, stays float32. In *int8* weights and the rows that
they are multiplied with are integers; the rest is as in float32, except attention, which is as in bfloat16 if faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidspec_models.backends.cpu.forward import Ahead, Blocks, forward
from vidspec_models.backends.cpu.int8 import TOGETHER
from vidspec_models.backends.cpu.layer_halves import Rows
from vidspec_models.backends.cpu.packing import MAX_LINES, STRIP, Array, as_array, step_weights
from vidspec_models.backends.cpu.segments import described, note_columns
from vidspec_models.backends.cpu.team import Member, Team
from vidspec_models.backends.cpu.team_size import TeamSize
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.kv_cache import KVCache

# While a server starts, its other processes use a core most of the time: with only 12 timed steps, four of six starts
# found that a second thread does not pay off.
_TIMED_ROWS, _TIMED_STEPS, _TIMED_S = 4, 60, 0.6
_LONG_STEP_S = 0.05
_MANY_ROWS = 8  # from here on a thread's part of the work outweighs the cost of waking it
_NEVER_NS = 2**63 - 1
_WORTH = 0.8  # of a step's time: at 0.7 an answer took three quarters as long, at 0.78 nearly as long as before

logger = logging.getLogger(__name__)


class CpuStep:
    """Weights in kernel form. Keeps no state between calls, except data in the caches and measured times.

    Scores are computed from transposed keys, in blocks of 32 rows. A block whose rows are final is transposed once and
    kept with its cache: to transpose all blocks in each step took longer than reading int8 weights. Caches with hidden
    rows have another order of rows, and are transposed each time.
    """

    def __init__(self, language_model: Any, lm_head: Any, decoder: Decoder, *, is_int8: bool = False) -> None:
        """Set `is_int8` to round the weights to int8; an embedding that is tied to the head must be rounded."""
        self.decoder = decoder
        self._embedding = as_array(decoder.embedding)
        self._tables = as_array(decoder.weights.rotary_tables)
        self._vocabulary = lm_head.weight.shape[0]
        self._query_type = np.uint16 if decoder.geometry.dtype is torch.bfloat16 else np.float32
        self.weights = step_weights(language_model, lm_head, integers_together=TOGETHER if is_int8 else 0)
        self._head = 2 * len(self.weights.mlp_norm)  # the half after the layers'
        self._no_blocks = Blocks(
            np.zeros(1, np.int64),
            np.empty((0, 0, 0, decoder.geometry.head_dim), np.float32),
            np.empty((0, *self._embedding.shape), np.float32),
        )
        self._no_tokens = self._ahead(torch.empty(0, self._vocabulary), 1.0, _NEVER_NS)
        self.use_threads(1)
        # Compiles the kernel, or loads it from the cache of an earlier start.
        self([0], [0], [Segment(KVCache(decoder.geometry, 1), 0, 1)])
        self.use_threads(self._best_team(self._step_s, torch.get_num_threads()))

    def __call__(self, ids: Sequence[int], positions: Sequence[int], segments: Sequence[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at rotary `positions`, rows in the order of the segments.

        Writes every row's keys and values; the caller advances the caches' lengths.
        """
        hidden, tables, table = self._embedding[list(ids)], self._tables[list(positions)], described(segments)
        logits = self._decode(hidden, tables, table)
        note_columns(segments, table)
        return torch.from_numpy(logits)[:, : self._vocabulary]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of rows [n, E] after the last layer; they have the bits of a step's."""
        rows, head = self.rows_of(hidden.numpy(), len(hidden)), range(self._head, self._head + 1)
        self._team.run(self.num_threads, lambda member: self.run(member, rows, self._tables, described([]), head))
        return torch.from_numpy(rows.logits)[:, : self._vocabulary]

    def run_ahead(
        self,
        ids: Sequence[int],
        position: int,
        segment: Segment,
        noise: Tensor,
        inverse_temperature: float,
        *,
        longest_s: float | None = None,
    ) -> tuple[list[int], list[float]]:
        """As many successive tokens as `noise` float32 [count, V] has rows, the first one after `ids`.

        Each token maximises `inverse_temperature` times logit plus noise; also returns its lead over the second best.
        Writes keys and values of all tokens except the last.

        Give `longest_s` if no other model needs the cores: then the call ends after about this time, with at least one
        token. Fewer tokens than asked for mean that other processes have taken cores, which hurts most here, as the
        threads wait for each other several times per token.
        """
        rows, table = self.rows_of(self._embedding[list(ids)], len(ids)), described([segment])
        began = time.monotonic()
        num_threads = self.num_threads if longest_s is None else self.alone.choose(began)
        until_ns = _NEVER_NS if longest_s is None else int(1e9 * (began + longest_s))
        ahead, everything = self._ahead(noise, inverse_temperature, until_ns), range(self._head + 1)
        self._team.run(
            num_threads, lambda member: self.run(member, rows, self._tables[position:], table, everything, ahead)
        )
        note_columns([segment], table)
        num_made, now = int(ahead.made[0]), time.monotonic()
        if longest_s is not None:
            self.alone.observe(num_threads, (now - began) / num_made, now)
        return ahead.tokens[:num_made].tolist(), ahead.margins[:num_made].tolist()

    def run(
        self,
        member: Member,
        rows: Rows,
        tables: Array,
        segments: Array,
        halves: range,
        ahead: Ahead | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        """As the kernel `forward`."""
        forward(
            member, rows, tables, segments, halves.start, halves.stop, self.weights, self._scratch(),
            ahead or self._no_tokens, blocks or self._no_blocks,
        )  # fmt: skip

    def rows_of(self, hidden: Array, num_logits: int = 0) -> Rows:
        """Buffers for rows hidden [n, E]."""
        weights, num_rows = self.weights, len(hidden)
        num_heads, width = weights.num_heads, self.decoder.geometry.head_dim
        inner = weights.gate_up.shape[1] * STRIP // 2
        return Rows(
            hidden,
            np.empty((num_rows, num_heads + 2 * weights.num_kv_heads, width), np.float32),
            np.empty((num_rows, num_heads, width), np.float32),
            np.empty((num_rows, 2 * inner), np.float32),
            np.empty((num_rows, inner), np.float32),
            np.empty((num_logits, weights.head.shape[0] * STRIP), np.float32),
        )

    def use_when_alone(self, most: int) -> None:
        """Let a lone request use up to `most` threads (see `use_threads`), if they pay off and the system has them."""
        count, alone = self.num_threads, max(self.num_threads, most)
        try:
            self.use_threads(count, alone)
        except RuntimeError:
            alone = count  # these threads exist already
        logger.info("a single request is decoded in compiled kernels, threads at most: %d", alone)

    def use_threads(self, count: int, most_alone: int | None = None) -> None:
        """Use `count` threads for steps from now on; and `count` to `most_alone` threads for `run_ahead` with
        `longest_s`, and for steps with many rows or several requests.

        Raises RuntimeError if the system has no more threads.
        """
        most = most_alone or count
        self._team = Team(most)
        self.num_threads, self.alone, self.many_rows = count, TeamSize(count, most), TeamSize(count, most)

    def _decode(self, hidden: Array, tables: Array, segments: Array) -> Array:
        """Logits [n, V padded] of rows hidden [n, E], with as many threads as pay off and have cores."""
        rows, began = self.rows_of(hidden, len(hidden)), time.monotonic()
        is_many = len(segments) == 1 and len(hidden) >= _MANY_ROWS
        wanted = self.many_rows.choose(began) if is_many else self.num_threads
        if len(segments) > 1:
            wanted = self._team.size  # with several requests a draft has little to do: no core is missed elsewhere
        num_threads = min(wanted, self.decoder.cores.num_threads)
        everything = range(self._head + 1)
        self._team.run(num_threads, lambda member: self.run(member, rows, tables, segments, everything))
        if is_many and num_threads == wanted:
            now = time.monotonic()
            self.many_rows.observe(num_threads, (now - began) / len(hidden), now)
        return rows.logits

    def _ahead(self, noise: Tensor, inverse_temperature: float, until_ns: int) -> Ahead:
        count = len(noise)
        tokens, margins, made = np.empty(count, np.int64), np.empty(count, np.float32), np.array([count])
        return Ahead(self._embedding, noise.numpy(), inverse_temperature, until_ns, tokens, margins, made)

    def _best_team(self, seconds_of: Callable[[int], float], most: int) -> int:
        """The number of threads for steps, up to `most`: doubled as long as that pays off, since more threads leave
        fewer cores to prompts and other processes. Timing may decide, since bits do not depend on the number.
        """
        found, best_s = 1, seconds_of(1)
        if best_s > _LONG_STEP_S:
            return most  # such a step is bound by memory, which more cores read faster
        while found < most:
            count = min(2 * found, most)
            if (seconds := seconds_of(count)) > _WORTH * best_s:
                break
            found, best_s = count, seconds
        return found

    def _step_s(self, num_threads: int) -> float:
        """The shortest measured time of a step of a few rows."""
        segment = Segment(KVCache(self.decoder.geometry, _TIMED_ROWS), 0, _TIMED_ROWS)
        self.use_threads(num_threads)
        times: list[float] = []
        while len(times) < _TIMED_STEPS and sum(times) < _TIMED_S:
            began = time.perf_counter()
            self([0] * _TIMED_ROWS, range(_TIMED_ROWS), [segment])
            times.append(time.perf_counter() - began)
        return min(times)

    def _scratch(self) -> NDArray[Any]:
        """Scratch for queries, [64, D], in the type of stored keys and values."""
        return np.empty((MAX_LINES, self.decoder.geometry.head_dim), self._query_type)
