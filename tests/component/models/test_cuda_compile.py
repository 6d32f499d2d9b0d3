"""The CUDA step's kernels compiled for an H100, which needs a compiler but no GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from vidspec_models.backends.cuda.batch import ROW_BUCKETS
from vidspec_models.decoder.int8 import BLOCK
from vidspec_models.synthetic.recipe import SHAPES, ModelShape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch's CUDA builds only"),
]

_H100, _ROOM = ("cuda", 90, 32), 232448  # bytes of shared memory for one program
_TYPES = {"layer": "i32", "size": "i32", "eps": "fp32", "scale": "fp32", "sums": "*fp32", "peaks": "*fp32"}
_TYPES |= {"weights": "*fp32", "blocks": "*i64", "rows": "*i64", "positions": "*i64", "parts": "*fp32"}
_TYPES |= {"num_columns": "i32", "inner": "i32", "num_blocks": "i32", "bests": "*fp32", "seconds": "*fp32"}
_TYPES |= {
    "noise": "*fp32",
    "inverse_temperature": "*fp32",
    "tokens": "*i64",
    "ids": "*i64",
    "state": "*i64",
    "found": "*fp64",
}
_EARLY = {"IS_EARLY": True}
_PAIR = SHAPES["llava-onevision-7b+0.5b"]
_ALIGNED = 16  # bytes of the largest load


def compiled(
    kernel: Callable[..., None], constants: dict[str, Any], types: dict[str, str] | None = None, **options: Any
) -> str:
    """The PTX; pointers are aligned as torch's allocations, and weight sizes are multiples of that alignment."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = triton.jit(kernel)
    given = {**_TYPES, **(types or {})}
    signature = {name: "constexpr" if name in constants else given.get(name, "*bf16") for name in function.arg_names}
    even = [
        index
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in ("num_columns", "inner", "size")
    ]
    aligned = {(index,): [["tt.divisibility", _ALIGNED]] for index in even}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(
        source, target=GPUTarget(*_H100), options={"enable_fp_fusion": True, "launch_pdl": True, **options}
    )
    assert made.asm["cubin"]
    assert made.metadata.shared <= _ROOM  # else it compiles, but cannot be launched
    return str(made.asm["ptx"])


@pytest.mark.parametrize("shape", [_PAIR.target, _PAIR.draft], ids=["7b", "0.5b"])
def test_attention_compiles_and_reads_keys_and_values_sixteen_bytes_at_a_time(shape: ModelShape) -> None:
    from vidspec_models.backends.cuda import kernels

    heads = {"HEADS": shape.num_heads, "KV": shape.num_kv_heads, "D": shape.head_dim}
    tiles = {**heads, "LINES": kernels.LINES, "TILE": kernels.TILE, "SPLITS": kernels.SPLITS, **_EARLY}
    for has_norm in (False, True):
        given = {"ROWS": 16, "PARTS": 2, "HAS_BIAS": not has_norm, "HAS_NORM": has_norm}
        compiled(kernels._rotate_and_store, {**heads, **given, **_EARLY})
    compiled(kernels._combine, tiles)
    ptx = compiled(kernels._attend_tiles, tiles, num_stages=1)
    loads = Counter(re.findall(r"ld\.global[.\w]*", ptx))
    assert loads["ld.global.v4.b32"] > 0
    assert not [kind for kind in loads if kind.endswith(("b16", "u16"))], loads  # would load a tile two bytes at a time
    assert "wgmma" in ptx  # products use the tensor cores


@pytest.mark.parametrize("num_rows", ROW_BUCKETS)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_int8", [False, True])
def test_products_are_made_by_the_same_instructions_for_any_number_of_rows(
    num_rows: int, is_gated: bool, is_int8: bool
) -> None:
    """Smaller tiles would compile to instructions of older GPUs, which sum in another order."""
    from vidspec_models.backends.cuda import products

    shape = {"ROWS": num_rows, "COLUMNS": products.COLUMNS, "INNER": products.INNER, "PARTS": 1, "IS_GATED": is_gated}
    fetched = {"FETCHED": products.FETCHED, "LINE": 128 if is_int8 else 64, "BLOCK": BLOCK if is_int8 else 0, **_EARLY}
    types = {"rows": "*bf16", "out": "*bf16", **({"weight": "*i8", "scales": "*fp32"} if is_int8 else {})}
    stages = products.num_stages(_ROOM, num_rows, products.INNER, (2, 1 if is_int8 else 2), is_gated=is_gated)
    ptx = compiled(products._multiply, {**shape, **fetched}, types, num_stages=stages)
    assert "wgmma" in ptx
    assert "mma.sync" not in ptx
    assert "st.shared" not in ptx  # weights are converted in registers
    sizes = set(re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx))
    assert sizes == ({"0x10", "0x8", "0x4"} if is_int8 else {"0x10"})  # of rows, integers and scales
    assert ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait")


def test_what_stands_between_products_compiles() -> None:
    from vidspec_models.backends.cuda import products, sampler

    for parts in (0, 4):
        compiled(products._add_and_norm, {"ROWS": 16, "PARTS": parts, "BLOCK": 4096, **_EARLY}, num_warps=8)
    compiled(sampler._best_two, {"BLOCK": 4096, **_EARLY}, num_warps=8)
    compiled(sampler._advance, {"BLOCKS": 64, "ROWS": 16, **_EARLY}, num_warps=1)
