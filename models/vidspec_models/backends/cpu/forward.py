"""The kernel that takes rows through layers: a step's, those of tokens one after the other, or a prompt's in blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vidspec_models.backends.cpu.kernel_cache import compiled, inlined
from vidspec_models.backends.cpu.layer_halves import Rows, add_product, finish, project
from vidspec_models.backends.cpu.layers import num_settled, rms_norm, turn_keys
from vidspec_models.backends.cpu.packing import LANES, STRIP, Array, StepWeights
from vidspec_models.backends.cpu.segments import COLUMNS, FIRST, KEPT, NUM_ROWS, START
from vidspec_models.backends.cpu.team import Member, begin_task, end_task, now_ns, share, take_part
from vidspec_models.backends.cpu.tiles import clear, copy_line


class Ahead(NamedTuple):
    """The tokens that are to follow a step's last row."""

    embedding: Array  # [V, E]
    noise: Array  # [count, V]
    inverse_temperature: float
    until_ns: int  # afterwards no further token is begun
    tokens: Array  # int64 [count], to be filled
    margins: Array  # [count], to be filled
    made: Array  # int64 [1]: count; becomes the number of filled ones if time passes before all are


class Blocks(NamedTuple):
    """Rows of a prompt in blocks. A thread computes a whole block: what is between a layer's products stays in its
    core's cache, and threads meet only after each half of a layer. A step has no blocks: threads share its products.
    """

    edges: NDArray[np.int64]  # [blocks + 1]: the rows that they begin and end with; [0] for a step
    noted: Array  # [layers, m, H, D], to be filled with rotated queries of the last m rows in the call's layers
    deepstack: Array  # [layers, n, E]: added to all n rows after each of the model's first layers


@compiled
def forward(
    member: Member, rows: Rows, tables: Array, segments: Array, begin: int, end: int, weights: StepWeights,
    queries: Array, ahead: Ahead, blocks: Blocks,
) -> None:  # fmt: skip
    """Halves begin..end of the layers, two of each, for rows with rotary tables [>= n, 2, D]; the half after them makes
    logits. Then the tokens of `ahead`, each from another step: a small model's step is shorter than the interpreter's
    time to start it. With `blocks` there is one segment, whose KEPT remains as it was.

    One kernel for all, since what several kernels use is optimised once in each, which takes most of a first start.

    A token maximises the inverse temperature times logit plus noise; its margin is the lead over the second best. With
    tokens there is one segment, and the tables are those of the following positions. queries [64, D] is a member's own
    scratch, of the type of stored keys and values. Keys of rows before a segment's first are also stored transposed, if
    the cache keeps such keys; then the segment's KEPT is updated.
    """
    count, num_blocks = len(ahead.tokens), max(blocks.edges.shape[0] - 1, 0)
    scratch = block_scratch(blocks.edges, rows)
    worker = Member(1, 0, np.zeros_like(member.own)) if num_blocks else member
    for i in range(max(count, 1)):
        if count and i == ahead.made[0]:
            break
        own, its, its_tables = rows, segments, tables
        for half in range(begin, end):
            part = begin_task(member, num_blocks) if num_blocks else 0
            while part >= 0:
                if num_blocks:  # the last rows attend to most and take longest, so they go first
                    first, last = blocks.edges[num_blocks - 1 - part], blocks.edges[num_blocks - part]
                    own, its_tables = rows_between(rows, scratch, first, last), tables[first:]
                    its = segment_of(segments, first, last)
                compute_half(worker, own, its_tables, its, half, weights, queries)
                if num_blocks:
                    add_rows(own.hidden, blocks.deepstack[half // 2 : half // 2 + half % 2], first)
                part = take_part(member) if num_blocks else -1
            if num_blocks:
                end_task(member)
                keep_projected(member, rows, segments, half, weights, queries, blocks.noted, (half - begin) // 2)
        if count:
            num_rows = rows.hidden.shape[0]
            begin_token(member, rows, segments, ahead, i)
            tables, rows = tables[num_rows:], first_of(rows)


@inlined
def compute_half(
    member: Member, rows: Rows, tables: Array, segments: Array, half: int, weights: StepWeights, queries: Array
) -> None:
    """Half a layer, or the logits after the last one."""
    layer = half // 2
    if layer == weights.mlp_norm.shape[0]:
        score_rows(member, rows, segments, weights)
    elif half % 2:
        finish(member, rows, segments, layer, weights, queries)
    else:
        project(member, rows, tables, segments, layer, weights, queries)


@inlined
def begin_token(member: Member, rows: Rows, segments: Array, ahead: Ahead, i: int) -> None:
    """Choose token i of `ahead` by the last row's logits, and make its row the next step's only one."""
    num_rows = rows.hidden.shape[0]
    part = begin_task(member, 1)
    while part >= 0:
        token, margin = choose(rows.logits[num_rows - 1], ahead.inverse_temperature, ahead.noise[i])
        ahead.tokens[i], ahead.margins[i] = token, margin
        segments[0, START] += num_rows
        segments[0, NUM_ROWS] = 1
        line = rows.hidden
        copy_line(line, ahead.embedding[token].ctypes.data, line.ctypes.data, line.shape[1] // LANES)
        if now_ns() > ahead.until_ns:
            ahead.made[0] = i + 1
        part = take_part(member)
    end_task(member)


@inlined
def first_of(rows: Rows) -> Rows:
    """Buffers for one row."""
    return Rows(
        rows.hidden[:1], rows.heads[:1], rows.mixed[:1], rows.gate_up[:1], rows.acted[:1], rows.logits[:1]
    )  # fmt: skip


@inlined
def score_rows(member: Member, rows: Rows, segments: Array, weights: StepWeights) -> None:
    """Logits of rows after the last layer; updates the KEPT of these segments."""
    normed, logits = np.empty_like(rows.hidden), rows.logits
    rms_norm(rows.hidden, weights.final_norm, weights.eps, normed)
    part = begin_task(member, 1)
    while part >= 0:  # done by one thread, after all attention
        for segment in range(segments.shape[0]):
            segments[segment, KEPT] = num_settled(segments[segment])
        for row in range(logits.shape[0]):
            clear(logits[row].ctypes.data, logits.shape[1] // LANES)
        part = take_part(member)
    end_task(member)
    add_product(member, normed, weights.head, logits)


@inlined
def choose(logits: Array, inverse_temperature: float, noise: Array) -> tuple[int, float]:
    """The best token, and its lead over the second best."""
    best, second, chosen = -math.inf, -math.inf, 0
    for token in range(len(noise)):
        score = inverse_temperature * logits[token] + noise[token]
        if score > best:
            best, second, chosen = score, best, token
        elif score > second:
            second = score
    return chosen, best - second


@inlined
def block_scratch(edges: Array, rows: Rows) -> Rows:
    """A thread's own buffers for the largest block's intermediate results; of a step those that threads share."""
    if edges.shape[0] < 2:
        return rows
    most = 0
    for block in range(edges.shape[0] - 1):
        most = max(most, edges[block + 1] - edges[block])
    _, num_heads, width = rows.mixed.shape
    mixed, gate_up = np.empty((most, num_heads, width), np.float32), np.empty((most, rows.gate_up.shape[1]), np.float32)
    return Rows(rows.hidden, rows.heads, mixed, gate_up, np.empty((most, rows.acted.shape[1]), np.float32), rows.logits)


@inlined
def rows_between(rows: Rows, scratch: Rows, first: int, last: int) -> Rows:
    """Rows first..last, with buffers of `scratch`."""
    count = last - first
    return Rows(
        rows.hidden[first:last], rows.heads[first:last], scratch.mixed[:count], scratch.gate_up[:count],
        scratch.acted[:count], rows.logits,
    )  # fmt: skip


@inlined
def segment_of(segments: Array, first: int, last: int) -> Array:
    """The segment of some of its rows; keys of all rows count as transposed, since `keep_projected` turns them."""
    own = segments.copy()
    own[0, FIRST], own[0, NUM_ROWS], own[0, START] = 0, last - first, segments[0, START] + first
    own[0, KEPT] = num_settled_after(segments)
    return own


@compiled
def num_settled_after(segments: Array) -> int:
    """How many rows are read transposed from the cache once all rows of the only segment are in it."""
    return int((segments[0, START] + segments[0, NUM_ROWS]) // STRIP * STRIP if segments[0, COLUMNS] else 0)


@inlined
def keep_projected(
    member: Member, rows: Rows, segments: Array, half: int, weights: StepWeights, queries: Array, noted: Array,
    place: int,
) -> None:  # fmt: skip
    """After a layer's first half, also store its keys transposed, and note queries at `place`."""
    num_parts = 0 if half % 2 else weights.num_kv_heads
    part = begin_task(member, num_parts)
    while part >= 0:
        head, line = half // 2 * weights.num_kv_heads + part, queries.shape[1] * queries.itemsize
        turn_keys(segments[0], head, num_settled_after(segments), line)
        part = take_part(member)
    end_task(member)
    num_noted, num_heads, width = noted.shape[1:]
    part = begin_task(member, min(num_noted, num_parts))
    while part >= 0:
        begin, end = share(part, min(num_noted, num_parts), num_noted)
        for row in range(begin, end):
            source = rows.heads[rows.heads.shape[0] - num_noted + row].ctypes.data
            copy_line(noted, source, noted[place, row].ctypes.data, num_heads * width // LANES)
        part = take_part(member)
    end_task(member)


@inlined
def add_rows(out: Array, layer: Array, first: int) -> None:
    """out [m, E] += rows of the layer's features [1, n, E] from `first` on; features of no layer have the length 0."""
    for features in layer:
        for row in range(out.shape[0]):
            for column in range(out.shape[1]):
                out[row, column] += features[first + row, column]
