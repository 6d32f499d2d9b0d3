"""The real 7B shape on a GPU: loading and decoding never hold more than weights, caches and 10 % on top."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from vidspec_models.decoder.kv_cache import KVPool
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import Turn
from vidspec_models.synthetic.recipe import SHAPES, Recipe, prompt_text
from vidspec_models.video_lm import StepRows

PAIR = "llava-onevision-7b+0.5b"
_ROOM = 32 * 2**30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_peak_memory_is_weights_and_caches_and_a_tenth(tmp_path: Path) -> None:
    if torch.cuda.get_device_properties(0).total_memory < _ROOM:
        pytest.skip("needs a GPU with 32 GiB")
    shape = SHAPES[PAIR].target
    Recipe(pair=PAIR, role="target").write(tmp_path)
    gc.collect()  # objects left by other tests
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_model(ModelSpec(path=str(tmp_path), role="target", device="cuda", dtype="bfloat16"))
    prompt = model.prepare([Turn(role="user", parts=(prompt_text(0),))], [])
    pool = KVPool(model.decoder.geometry, 16384)
    cache = pool.new_cache()
    assert pool.grow(cache, prompt.num_tokens + 64)
    while cache.length < prompt.num_tokens:
        model.prefill(prompt, cache, 512)
    for position in range(prompt.num_tokens, prompt.num_tokens + 32):
        model.step([StepRows(cache=cache, ids=[1], position=position)])
    needed = 2 * shape.parameters() + cache.keys.nbytes + cache.values.nbytes
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * needed
