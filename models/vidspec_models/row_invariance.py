"""Row invariance: n rows scored together must give each row the bits it gets alone.

Without it a verification forward could pick another token than single-row decoding at a near-tie, and the text
would depend on how well the draft guesses. Matrix libraries choose kernels and summation orders by shape, so the
property is not free. Four rules about shapes restore it on every CPU seen so far:

* the form of the products (see `product`);
* never fewer than `min_rows` rows in one (a single row may take another code path than two);
* attend over a context padded to a multiple of `context_block`, so that sums over it split alike;
* attend with a multiple of `attention_lines` query lines (MKL on AMD processors takes another kernel for few).

On CUDA a product's kernel is chosen by its number of rows at every step of that number, so rows are padded to one of
two sizes, or to one if even these two disagree; up to there a product's time is that of reading its weight.

`find_row_rule` measures, once per load and with the model's own shapes, which rule this machine needs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.attention import AttendChunk, CausalMasks, attend
from vidspec_models.product import Product, ProductForm, can_pack

_MIN_ROWS = (1, 2, 4)
_PLAIN = tuple(ProductForm(is_packed=False, max_inner=most) for most in (None, 512, 256))
_CACHED_BYTES = 16 * 2**20
_BLOCKS = (64, 256, 512)
_LINES = (1, 16, 32)
_ROW_COUNTS = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33)
_CUDA_ROWS = (16, 64)
_BOUNDARIES = (64, 256, 320, 384, 512, 640, 768, 1024)  # contexts at which kernels were seen to change


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """The shape rule a decoder follows; `holds` says whether the measurement confirmed it."""

    form: ProductForm
    min_rows: int
    context_block: int
    attention_lines: int = 1
    holds: bool
    row_buckets: tuple[int, ...] = ()  # ascending; a smaller number of rows is padded to the next of them
    attend_chunk: AttendChunk | None = None  # of a prompt's rows, whose bits nobody compares; None: torch's

    def padded(self, num_rows: int) -> int:
        """Rows that a product is made for where `num_rows` are wanted."""
        return next((size for size in self.row_buckets if size >= num_rows), max(num_rows, self.min_rows))

    def pad(self, rows: Tensor) -> Tensor:
        """Rows [n, K] with the last one repeated up to the number that a product is made for."""
        missing = self.padded(rows.shape[0]) - rows.shape[0]
        return rows if missing <= 0 else torch.cat((rows, rows[-1:].expand(missing, -1)))


# For a decoder that only prefills: its chunks are the same whatever else is running.
PREFILL_RULE = RowRule(form=ProductForm(is_packed=False), min_rows=1, context_block=_BLOCKS[0], holds=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """The shapes that occur in a decoding step."""

    weights: tuple[Tensor, ...]  # one of each shape, [N, K]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_bytes: int  # of all the weights that a step reads


def find_row_rule(shapes: StepShapes) -> RowRule:
    """The cheapest rule under which all sampled row counts and places give equal bits."""
    if shapes.weights[0].is_cuda:
        return _cuda_rule(shapes)
    generator = torch.Generator().manual_seed(0)
    rules = itertools.product(_forms(shapes), _MIN_ROWS)
    found = next(((form, rows) for form, rows in rules if _products_agree(shapes, rows, form, generator)), None)
    extents = itertools.product(_LINES, _BLOCKS)
    extent = next((extent for extent in extents if _attention_agrees(shapes, *extent, generator)), None)
    form, min_rows = found or (_PLAIN[0], 2)
    lines, block = extent or (_LINES[0], _BLOCKS[-1])
    return RowRule(
        form=form,
        min_rows=min_rows,
        context_block=block,
        attention_lines=lines,
        holds=found is not None and extent is not None,
    )


def _cuda_rule(shapes: StepShapes) -> RowRule:
    generator = torch.Generator().manual_seed(0)
    form, last = _PLAIN[0], _CUDA_ROWS[-1:]
    buckets = next((sizes for sizes in (_CUDA_ROWS, last) if _agree(shapes, sizes, form, generator)), None)
    block = next((block for block in _BLOCKS if _attention_agrees(shapes, 1, block, generator)), None)
    return RowRule(
        form=form,
        min_rows=(buckets or last)[0],
        context_block=block or _BLOCKS[-1],
        holds=buckets is not None and block is not None,
        row_buckets=buckets or last,
    )


def _forms(shapes: StepShapes) -> tuple[ProductForm, ...]:
    """Packing pays where weights are streamed from memory; where they stay in cache its fixed cost does not."""
    packed = (ProductForm(is_packed=True),) if can_pack(shapes.weights[0]) else ()
    return (*packed, *_PLAIN) if shapes.num_bytes > _CACHED_BYTES else (*_PLAIN, *packed)


def _random(size: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator).to(like.device, like.dtype)


def _products_agree(shapes: StepShapes, min_rows: int, form: ProductForm, generator: torch.Generator) -> bool:
    return _agree(shapes, (min_rows, *(n for n in _ROW_COUNTS if n > min_rows)), form, generator)


def _agree(shapes: StepShapes, counts: tuple[int, ...], form: ProductForm, generator: torch.Generator) -> bool:
    """Whether a row gets the same bits as the first of counts[0] rows and anywhere among each other count."""
    min_rows, most = counts[0], counts[-1]
    for weight in shapes.weights:
        product = Product(weight, form)
        rows = _random((most + min_rows, weight.shape[1]), weight, generator)
        residual = _random((most + min_rows, weight.shape[0]), weight, generator)
        alone = torch.cat([_results(product, rows, residual, i, min_rows)[:1] for i in range(most)])
        for n in counts:
            if not torch.equal(_results(product, rows, residual, 0, n), alone[:n]):
                return False
    return True


def _results(product: Product, rows: Tensor, residual: Tensor, start: int, count: int) -> Tensor:
    """Both ways in which a step uses a product, side by side."""
    chosen = slice(start, start + count)
    return torch.cat((product(rows[chosen]), product.added_to(residual[chosen], rows[chosen])), dim=-1)


def _attention_agrees(shapes: StepShapes, lines: int, block: int, generator: torch.Generator) -> bool:
    like = shapes.weights[0]
    scale, together = shapes.head_dim**-0.5, 12
    capacity = -(-(max(_BOUNDARIES) + together) // block) * block
    group = shapes.num_heads // shapes.num_kv_heads
    masks = CausalMasks(capacity, block, group, like.dtype, like.device, lines)
    keys = _random((1, shapes.num_kv_heads, capacity, shapes.head_dim), like, generator)
    values = _random((1, shapes.num_kv_heads, capacity, shapes.head_dim), like, generator)
    queries = _random((capacity, shapes.num_heads, shapes.head_dim), like, generator)

    def rows(start: int, count: int) -> Tensor:
        context = masks.padded(start + count)
        visible = (keys[:, :, :context], values[:, :, :context])
        return attend(queries[start : start + count], *visible, masks.rows(start, count), scale)

    for boundary in _BOUNDARIES:
        start = boundary - together // 2
        alone = torch.cat([rows(start + i, 1) for i in range(together)])
        if not all(torch.equal(rows(start, count), alone[:count]) for count in (2, 5, together)):
            return False
    return True
