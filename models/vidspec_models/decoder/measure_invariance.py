"""Which rule of batch invariance a machine needs: measured once per load, with the model's own shapes.

Three rules about shapes restore the property on every CPU seen so far:

* the form of the products (see `product_of`);
* never fewer than `min_rows` rows in a product, and never a single one, which takes another code path than two;
* each row of a step attends by itself.

The last two are not measured for single rows: with 16-bit numbers, one value of many thousands differs, so that a
measurement may miss it.

On CUDA every change of the number of rows may select another kernel for a product. So rows are padded to one of two
sizes, or to one size if even these two disagree; up to 64 rows a product takes only the time to read its weight. The
context is padded to a multiple of `context_block`, so that attention splits its sums in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vidspec_models.decoder.batch_invariant_ops import BatchInvariance, CausalMasks, Product, attend
from vidspec_models.decoder.weights import PackedProduct, product_of

_BLOCKS = (64, 256, 512)
_ROW_COUNTS = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33)
_CUDA_ROWS = (16, 64)
_BOUNDARIES = (64, 256, 320, 384, 512, 640, 768, 1024)  # contexts at which kernels were seen to change
_CACHED_BYTES = 16 * 2**20

# For a decoder that only prefills: a prompt's chunks do not depend on other requests.
PREFILL_ONLY = BatchInvariance(min_rows=1, context_block=_BLOCKS[0], holds=True)
_MIN_ROWS = (2, 4)
_PLAIN = tuple(replace(PREFILL_ONLY, max_inner=most) for most in (None, 512, 256))
_PACKED = replace(PREFILL_ONLY, is_packed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """The shapes that occur in a decoding step."""

    weights: tuple[Tensor, ...]  # one weight [N, K] of each shape
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_bytes: int  # size of all weights that a step reads


def measure_invariance(shapes: StepShapes) -> BatchInvariance:
    """The cheapest rule with which all sampled row counts and positions give equal bits."""
    if shapes.weights[0].is_cuda:
        return _on_cuda(shapes)
    generator = torch.Generator().manual_seed(0)
    found = next((rule for rule in _product_rules(shapes) if _products_agree(shapes, rule, generator)), None)
    return replace(found or replace(_PLAIN[0], min_rows=2), attends_alone=True, holds=found is not None)


def _on_cuda(shapes: StepShapes) -> BatchInvariance:
    generator = torch.Generator().manual_seed(0)
    last = _CUDA_ROWS[-1:]
    buckets = next((sizes for sizes in (_CUDA_ROWS, last) if _agree(shapes, sizes, _PLAIN[0], generator)), None)
    block = next((block for block in _BLOCKS if _attention_agrees(shapes, block, generator)), None)
    return BatchInvariance(
        min_rows=(buckets or last)[0],
        context_block=block or _BLOCKS[-1],
        holds=buckets is not None and block is not None,
        row_buckets=buckets or last,
    )


def _product_rules(shapes: StepShapes) -> list[BatchInvariance]:
    """Rules to try, cheapest first. Packing pays off if weights are read from memory, but not if they stay in cache,
    because of its fixed cost.
    """
    packed = (_PACKED,) if _can_pack(shapes.weights[0]) else ()
    forms = (*packed, *_PLAIN) if shapes.num_bytes > _CACHED_BYTES else (*_PLAIN, *packed)
    return [replace(form, min_rows=min_rows) for form in forms for min_rows in _MIN_ROWS]


def _can_pack(weight: Tensor) -> bool:
    """Whether this torch build, device and type support the packed form."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        PackedProduct(weight[:1])(weight[:1])
    except (RuntimeError, AttributeError):  # torch does not guarantee this operator
        return False
    return True


def _random(size: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator).to(like.device, like.dtype)


def _products_agree(shapes: StepShapes, rule: BatchInvariance, generator: torch.Generator) -> bool:
    return _agree(shapes, (rule.min_rows, *(n for n in _ROW_COUNTS if n > rule.min_rows)), rule, generator)


def _agree(shapes: StepShapes, counts: tuple[int, ...], rule: BatchInvariance, generator: torch.Generator) -> bool:
    """Whether a row gets the same bits as the first of counts[0] rows and at any place in each other count of rows."""
    min_rows, most = counts[0], counts[-1]
    for weight in shapes.weights:
        product = product_of(weight, rule)
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


def _attention_agrees(shapes: StepShapes, block: int, generator: torch.Generator) -> bool:
    like = shapes.weights[0]
    scale, together = shapes.head_dim**-0.5, 12
    capacity = -(-(max(_BOUNDARIES) + together) // block) * block
    group = shapes.num_heads // shapes.num_kv_heads
    masks = CausalMasks(capacity, block, group, like.dtype, like.device)
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
