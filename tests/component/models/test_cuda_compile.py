"""The CUDA step's kernels as machine code for an H100, which needs a compiler and no GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from vidspec_models.synthetic.recipe import SHAPES, Shape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch's CUDA builds only"),
]

_H100 = ("cuda", 90, 32)
_TYPES = {"layer": "i32", "size": "i32", "eps": "fp32", "scale": "fp32", "sums": "*fp32", "peaks": "*fp32"}
_TYPES |= {"weights": "*fp32", "blocks": "*i64", "rows": "*i64", "positions": "*i64"}
_PAIR = SHAPES["llava-onevision-7b+0.5b"]
_ALIGNED = 16  # bytes of the largest load


def compiled(kernel: Callable[..., None], constants: dict[str, Any], **options: Any) -> str:
    """PTX; every pointer is as aligned as torch's allocations are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = triton.jit(kernel)
    signature = {name: "constexpr" if name in constants else _TYPES.get(name, "*bf16") for name in function.arg_names}
    pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
    aligned = {(index,): [["tt.divisibility", _ALIGNED]] for index in pointers}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget(*_H100), options={"enable_fp_fusion": True, **options})
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


@pytest.mark.parametrize("shape", [_PAIR.target, _PAIR.draft], ids=["7b", "0.5b"])
def test_a_step_compiles_and_reads_keys_and_values_sixteen_bytes_at_a_time(shape: Shape) -> None:
    from vidspec_models.backends.cuda import kernels

    heads = {"HEADS": shape.num_heads, "KV": shape.num_kv_heads, "D": shape.head_dim}
    tiles = {"LINES": kernels.LINES, "TILE": kernels.TILE, "SPLITS": kernels.SPLITS}
    for has_norm in (False, True):
        compiled(kernels._rotate_and_store, {**heads, "HAS_NORM": has_norm})
    compiled(kernels._combine, {**heads, **tiles})
    compiled(kernels._gate, {"BLOCK": 1024})
    ptx = compiled(kernels._attend_tiles, {**heads, **tiles}, num_stages=1)
    loads = Counter(re.findall(r"ld\.global[.\w]*", ptx))
    assert loads["ld.global.v4.b32"] > 0
    assert not [kind for kind in loads if kind.endswith(("b16", "u16"))], loads  # a whole tile, two bytes at a time
    assert "wgmma" in ptx  # products are made by the tensor cores
