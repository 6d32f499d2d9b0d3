"""A layer's operations on a step's rows: products with strips of weights, norms, attention with the rows' own caches.

All functions are compiled to run without the interpreter lock, and cached between starts. They also write the caches'
new rows. Loops over numbers replace slice assignments: numba compiles these with all their error messages, which takes
as long as the rest.
"""

from __future__ import annotations

import math

import numpy as np

from vidspec_models.backends.cpu.kernel_cache import compiled, inlined
from vidspec_models.backends.cpu.packing import LANES, MAX_LINES, STRIP, Array, StepWeights
from vidspec_models.backends.cpu.segments import (
    CAPACITY,
    COLUMNS,
    FIRST,
    FIRST_HIDDEN_LAYER,
    HIDDEN,
    KEPT,
    KEYS,
    NUM_ROWS,
    START,
    VALUES,
)
from vidspec_models.backends.cpu.tiles import (
    FEWER_ROWS,
    MAX_ROWS,
    copy_line,
    exponentials,
    largest,
    rotate,
    score_tile,
    strip_tile,
    sum_of_squares,
    transpose_lines,
    value_tile,
)

FLOAT = 4  # bytes


@compiled
def rounded(x: Array) -> Array:
    """x [n, K] as bfloat16."""
    out = np.empty(x.shape, np.uint16)
    for row in range(x.shape[0]):
        copy_line(out, x[row].ctypes.data, out[row].ctypes.data, x.shape[1] // LANES)
    return out


@compiled
def strip_product(x: Array, strips: Array, out: Array, begin: int, end: int) -> None:
    """out [n, N] += x [n, K] times strips [N / 32, K, 32], see `StepWeights`; only columns of strips begin..end.

    x is float32, or bfloat16 where the strips are.
    """
    num_rows, inner, width = x.shape[0], strips.shape[1], strips.shape[2]
    num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    x_stride, out_stride = x.shape[1], out.shape[1]
    for strip in range(begin, end):
        weights = strips[strip].ctypes.data
        first = 0
        for tile in range(num_tiles):
            last = num_rows * (tile + 1) // num_tiles
            lines = x.ctypes.data + first * x_stride * x.itemsize
            place = out.ctypes.data + (first * out_stride + strip * STRIP) * FLOAT
            strip_tile(x, strips, last - first, lines, x_stride, weights, width, place, out_stride, inner)
            first = last


@compiled
def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row; [n, K]."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        squares = sum_of_squares(x[row].ctypes.data, width // LANES)
        factor = np.float32(1.0 / math.sqrt(squares / width + eps))
        for column in range(width):
            out[row, column] = x[row, column] * factor * weight[column]


@inlined
def score(
    queries: Array, num_lines: int, keys: int, columns: int, num_columns: int, num_keys: int, scores: Array
) -> None:  # fmt: skip
    """scores = lines of queries [64, D] times keys, in whole strips; the first `num_columns` keys lie transposed."""
    width = queries.shape[1]
    words = width * queries.itemsize // FLOAT  # of a line
    transposed = np.empty((words, STRIP), np.float32)
    num_tiles = (num_lines + MAX_ROWS - 1) // MAX_ROWS
    for key in range(0, num_keys, STRIP):
        place = key * width * queries.itemsize
        turned = columns + place
        if key >= num_columns:
            turned = np.int64(transposed.ctypes.data)
            transpose_lines(keys + place, min(STRIP, num_keys - key), words // LANES, turned)
        for tile in range(num_tiles):
            first, last = num_lines * tile // num_tiles, num_lines * (tile + 1) // num_tiles
            lines, out = queries[first].ctypes.data, scores[first, key:].ctypes.data
            score_tile(queries, last - first, lines, width, turned, out, scores.shape[1], words)


@compiled
def room_for_scores(longest: int) -> Array:
    """Scratch of `attend` for rows that see up to `longest` cached rows, in whole strips.

    Has at least one more column: a row's last weight may be multiplied as part of a pair.
    """
    return np.empty((MAX_LINES, (longest // STRIP + 1) * STRIP), np.float32)


@compiled
def attend(
    queries: Array, num_lines: int, group: int, keys: int, values: int, columns: int, num_columns: int, context: int,
    scale: float, scores: Array, out: Array,
) -> None:  # fmt: skip
    """Attention of successive rows' query heads, `group` per row, with one key/value head.

    queries and out have width D and at least `num_lines` rows. Queries and softmax weights have the type of keys and
    values. The first row sees `context` cached rows, each further row one more. Together they read the keys once, see
    `score`; keys that a row does not see have weight exactly 0. out is overwritten; scores is scratch, see
    `room_for_scores`.
    """
    width, stride = queries.shape[1], scores.shape[1]
    longest = context + (num_lines - 1) // group
    score(queries, num_lines, keys, columns, num_columns, longest, scores)
    weights = np.empty((num_lines, stride), queries.dtype)
    totals = np.empty(num_lines, np.float32)
    for line in range(num_lines):
        own = context + line // group
        padded = (own + LANES - 1) // LANES * LANES
        for column in range(own, padded):
            scores[line, column] = -np.inf
        numbers = scores[line].ctypes.data
        most = np.float32(scale * largest(numbers, padded // LANES))
        weighed = weights[line].ctypes.data
        totals[line] = exponentials(queries, numbers, np.float32(scale), most, padded // LANES, weighed)
        for column in range(own, longest + 1):
            weights[line, column] = 0
    most_lines = FEWER_ROWS if queries.itemsize < FLOAT else MAX_ROWS
    num_tiles = (num_lines + most_lines - 1) // most_lines
    for tile in range(num_tiles):
        first, last = num_lines * tile // num_tiles, num_lines * (tile + 1) // num_tiles
        for column in range(0, width, STRIP):
            start, place = values + column * queries.itemsize, out[first, column:].ctypes.data
            lines = weights[first].ctypes.data
            value_tile(queries, last - first, lines, stride, start, width, place, width, longest)
    for line in range(num_lines):
        total = totals[line]
        for column in range(width):
            out[line, column] /= total


@compiled
def turned_keys(segment: Array, head: int, line: int) -> int:
    """The address of a head's transposed keys; `head` counts through all layers, a row has `line` bytes."""
    return int(segment[COLUMNS] + head * ((segment[CAPACITY] + STRIP - 1) // STRIP) * STRIP * line)


@compiled
def turn_keys(segment: Array, head: int, num_columns: int, line: int) -> None:
    """Also store the keys of rows KEPT..num_columns transposed, in blocks."""
    keys, turned = segment[KEYS] + head * segment[CAPACITY] * line, turned_keys(segment, head, line)
    for row in range(segment[KEPT], num_columns, STRIP):
        transpose_lines(keys + row * line, STRIP, line // FLOAT // LANES, turned + row * line)


@inlined
def write_keys_and_values(
    heads: Array, segment: Array, layer: int, kv: int, tables: Array, weights: StepWeights, queries: Array
) -> None:
    """Norm and rotate a segment's heads [rows, H + 2 KV, D], write keys and values in the type of `queries`.

    Only for one key/value head and the query heads that read it. Also transposes keys written by earlier calls, if the
    cache keeps transposed keys.
    """
    first, num_rows, start = segment[FIRST], segment[NUM_ROWS], segment[START]
    keys, values, capacity = segment[KEYS], segment[VALUES], segment[CAPACITY]
    width, num_heads, num_kv_heads = heads.shape[2], weights.num_heads, weights.num_kv_heads
    group = num_heads // num_kv_heads
    line, num_vectors = width * queries.itemsize, width // LANES
    head_norm = weights.head_norm[layer]
    for row in range(first, first + num_rows):
        for member in range(group + 1):  # the last one is the key itself
            head = kv * group + member if member < group else num_heads + kv
            if head_norm.shape[0]:
                one = heads[row, head : head + 1]
                rms_norm(one, head_norm[head], weights.eps, one)
            rotate(heads[row, head].ctypes.data, tables[row].ctypes.data, num_vectors)
        place = ((layer * num_kv_heads + kv) * capacity + start + row - first) * line
        copy_line(queries, heads[row, num_heads + kv].ctypes.data, keys + place, num_vectors)
        copy_line(queries, heads[row, num_heads + num_kv_heads + kv].ctypes.data, values + place, num_vectors)
    turn_keys(segment, layer * num_kv_heads + kv, num_settled(segment), line)


@compiled
def num_settled(segment: Array) -> int:
    """How many of the rows before a segment's first are read transposed; 0 if the cache keeps no transposed keys."""
    return int(segment[START] // STRIP * STRIP if segment[COLUMNS] else 0)


@inlined
def attend_segment(
    heads: Array, segment: Array, layer: int, kv: int, begin: int, end: int, weights: StepWeights, queries: Array,
    scores: Array, mixed: Array,
) -> None:  # fmt: skip
    """Attention of rows begin..end of a segment's heads [rows, H + 2 KV, D]; keys and values are already written.

    Only for the query heads that read key/value head `kv`; writes to mixed [rows, H, D].

    queries [64, D] and scores are scratch; queries have the type of stored keys and values.
    """
    start, capacity, width = segment[START], segment[CAPACITY], heads.shape[2]
    group = weights.num_heads // weights.num_kv_heads
    line, num_vectors = width * queries.itemsize, width // LANES
    skipped = segment[HIDDEN] if layer >= segment[FIRST_HIDDEN_LAYER] else 0
    head = layer * weights.num_kv_heads + kv
    place, columns = (head * capacity + skipped) * line, turned_keys(segment, head, line)
    at_once = MAX_LINES // group
    out = np.empty((min(at_once, end - begin) * group, width), np.float32)
    for row in range(begin, end, at_once):
        count, first = min(at_once, end - row), segment[FIRST] + row
        for i in range(count * group):
            query = heads[first + i // group, kv * group + i % group]
            copy_line(queries, query.ctypes.data, queries[i].ctypes.data, num_vectors)
        attend(
            queries, count * group, group, segment[KEYS] + place, segment[VALUES] + place, columns,
            num_settled(segment), start + row + 1 - skipped, weights.scale, scores, out,
        )  # fmt: skip
        for i in range(count):
            for member in range(group):
                source, target = out[i * group + member], mixed[first + i, kv * group + member]
                copy_line(mixed, source.ctypes.data, target.ctypes.data, num_vectors)
