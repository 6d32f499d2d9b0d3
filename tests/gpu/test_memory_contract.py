"""On a real GPU, a worker's KV budget can be filled to the last token, with a prefill and a step on top."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from vidspec_models.decoder.kv_cache import KVPool
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import Turn
from vidspec_models.synthetic.recipe import Recipe, prompt_text
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.config import EngineConfig, WorkerConfig, prefill_rows
from vidspec_service.engine.kv_budget import kv_budgets
from vidspec_service.engine.worker.memory import measure_memory

CONFIG = EngineConfig(target=WorkerConfig(model="random"), max_context=8192)
_UTILIZATION = 0.9


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    """The 0.5B model loads in seconds and leaves most of the device for keys and values."""
    folder: Path = tmp_path_factory.mktemp("draft")
    Recipe(pair="llava-onevision-7b+0.5b", role="draft").write(folder)
    gc.collect()
    return load_model(ModelSpec(path=str(folder), role="draft", device="cuda", dtype="bfloat16"))


@pytest.mark.slow
def test_the_whole_budget_can_be_held_and_work_goes_on_within_the_share(draft: VideoLM) -> None:
    memory = measure_memory(draft, CONFIG)
    budget = kv_budgets({"draft": memory}, _UTILIZATION)["draft"]
    pool = KVPool(draft.decoder.geometry, budget)
    kept = []
    while pool.fits(memory.context):  # requests of full contexts, as many as there is room for
        cache = pool.new_cache()
        assert pool.grow(cache, memory.context)
        kept.append(cache)
    prompt = draft.prepare([Turn(role="user", parts=(prompt_text(0),))], [])
    cache = kept[-1]
    while cache.length < prompt.num_tokens:
        draft.prefill(prompt, cache, prefill_rows(CONFIG, "cuda", 1))
    draft.step([StepRows(cache=cache, ids=[1] * 16, position=prompt.num_tokens)])
    torch.cuda.synchronize()
    (mine,) = memory.devices
    free, total = torch.cuda.mem_get_info()
    assert total - free <= _UTILIZATION * total
    assert total - free >= 0.8 * _UTILIZATION * total - mine.activations  # and the budget uses the device


def test_a_share_that_the_weights_fill_is_refused(draft: VideoLM) -> None:
    memory = measure_memory(draft, CONFIG)
    with pytest.raises(Exception, match="no room for one context"):
        kv_budgets({"draft": memory}, 0.01)
