"""Losslessness: the ids of every mode are the target's, and the target's are transformers'."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.component.engine.conftest import PAIR
from tests.component.engine.family_world import Traced, TracedHarness
from tests.component.engine.harness import EngineHarness, ask, scene_video, unsure_video
from vidspec_models.bundled.scene import NUM_SLOTS
from vidspec_models.decoder.placement import has_avx512_bf16
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.reference.stock import StockGenerator
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode, Video
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.types import FinishReason
from vidspec_service.settings import Settings, engine_config

PROMPTS = ("Describe the video.", "How many objects are there?", "What is going on here, in your own words?")
MODES = (SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)
CASES = [(seed, PROMPTS[seed % len(PROMPTS)]) for seed in range(8)]


def video_for(seed: int) -> Video:
    """Two of eight have all frames, so that requests of several lengths run at once and prefill takes little time."""
    num_frames = NUM_SLOTS if seed in (0, 7) else 2
    return unsure_video(seed, num_frames) if seed % 4 == 3 else scene_video(seed, num_frames)


def test_greedy_ids_equal_stock_generate_alone_and_eight_at_once(engine: EngineHarness) -> None:
    stock = StockGenerator(ModelSpec(path="bundled", role="target", dtype="float32"))
    requests = [ask(f"hf-{seed}", prompt, [video_for(seed)], speculation=SpeculationMode.OFF) for seed, prompt in CASES]
    expected = [stock.answer(request.turns, request.videos, 40).ids for request in requests]
    assert [engine.answer(request).ids for request in requests[:4]] == expected[:4]
    assert [answer.ids for answer in engine.answers(requests)] == expected


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        pytest.param(SamplingParams(temperature=0.8, seed=1), marks=pytest.mark.slow),
        SamplingParams(temperature=1.2, top_p=0.9, top_k=20, seed=2**63),
    ],
    ids=["greedy", "temperature", "top-k and top-p"],
)
def test_every_mode_gives_the_same_ids(engine: EngineHarness, sampling: SamplingParams) -> None:
    for seed, prompt in CASES[:4]:
        found = {
            mode: engine.answer(
                ask(f"{mode}-{seed}", prompt, [video_for(seed)], sampling=sampling, speculation=mode, max_tokens=48)
            ).ids
            for mode in MODES
        }
        assert len(set(found.values())) == 1, found


def test_modes_mixed_in_one_batch_do_not_disturb_each_other(engine: EngineHarness) -> None:
    law = SamplingParams(temperature=1.0, seed=77)
    alone = [
        engine.answer(ask(f"a{seed}", prompt, [video_for(seed)], sampling=law, speculation=SpeculationMode.OFF)).ids
        for seed, prompt in CASES
    ]
    together = engine.answers(
        [
            ask(f"t{seed}", prompt, [video_for(seed)], sampling=law, speculation=MODES[seed % 4])
            for seed, prompt in CASES
        ]
    )
    assert [answer.ids for answer in together] == alone


_IN_BFLOAT16 = pytest.mark.skipif(not has_avx512_bf16(), reason="a processor without AVX512_BF16 serves in float32")


@pytest.mark.parametrize(
    "dtype", [pytest.param("bfloat16", marks=_IN_BFLOAT16), "int8", pytest.param("int4", marks=pytest.mark.slow)]
)
def test_every_mode_gives_the_same_ids_in_narrow_numbers_alone_and_eight_at_once(dtype: str) -> None:
    """Rounding is coarser by 2**16, so that a dependence on the number of rows would show within a few tokens."""
    narrow = WorkerConfig(model="bundled", dtype=dtype)
    harness = EngineHarness(EngineConfig(target=narrow, draft=narrow))
    law = SamplingParams(temperature=0.8, seed=3)

    def questions(name: str, mode: SpeculationMode) -> list[GenerationRequest]:
        return [
            ask(f"{name}-{mode}-{seed}", prompt, [video_for(seed)], sampling=law, speculation=mode, max_tokens=48)
            for seed, prompt in CASES
        ]

    try:
        alone = [harness.answer(question).ids for question in questions("alone", SpeculationMode.OFF)]
        for mode in MODES:
            assert [answer.ids for answer in harness.answers(questions("together", mode))] == alone, mode
        assert [harness.answer(q).ids for q in questions("alone", SpeculationMode.PARALLEL)] == alone
    finally:
        harness.close()


def test_a_seed_reproduces_and_another_seed_does_not(engine: EngineHarness) -> None:
    def draw(name: str, seed: int) -> tuple[int, ...]:
        law = SamplingParams(temperature=1.5, seed=seed)
        return engine.answer(ask(name, PROMPTS[0], [unsure_video(5)], sampling=law)).ids

    assert draw("first", 1) == draw("again", 1) != draw("other", 2)


def test_speculation_is_reported(engine: EngineHarness) -> None:
    answer = engine.answer(ask("report", PROMPTS[0], [scene_video(1)], speculation=SpeculationMode.PARALLEL))
    stats = answer.finished.speculation
    assert stats.mode is SpeculationMode.PARALLEL
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_verifications < answer.finished.completion_tokens
    assert answer.started.video_tokens == 8 * 64 + 1


def test_max_tokens_and_stop_strings_end_an_answer(engine: EngineHarness) -> None:
    short = engine.answer(ask("short", PROMPTS[0], [scene_video(1)], max_tokens=3))
    assert (len(short.ids), short.finished.finish_reason) == (3, FinishReason.LENGTH)
    full = engine.answer(ask("full", PROMPTS[0], [scene_video(1)], max_tokens=150))
    word = full.text.split()[4]
    stopped = engine.answer(ask("stop", PROMPTS[0], [scene_video(1)], max_tokens=150, stop=(word,)))
    assert stopped.text == full.text[: full.text.index(word)]
    assert stopped.finished.finish_reason is FinishReason.STOP
    assert stopped.finished.completion_tokens < full.finished.completion_tokens


def test_an_answer_without_a_limit_has_the_engines_default(engine: EngineHarness) -> None:
    request = replace(ask("default", PROMPTS[0], [unsure_video(3)], sampling=SamplingParams(temperature=2.0)), stop=())
    answer = engine.answer(replace(request, max_tokens=None))
    assert len(answer.ids) <= PAIR.default_max_tokens


def test_a_conversation_without_a_video_is_answered(engine: EngineHarness) -> None:
    answer = engine.answer(ask("text", "Hello.", [], max_tokens=5))
    assert answer.started.video_tokens == 0
    assert answer.finished.completion_tokens >= 1


def test_requests_that_do_not_fit_at_once_are_paused_and_lose_nothing(engine: EngineHarness) -> None:
    """Six requests with room for little more than two prompts: the youngest are paused and resumed."""
    law = SamplingParams(temperature=1.0, seed=5)
    requests = [ask(f"p{seed}", PROMPTS[0], [unsure_video(seed)], sampling=law, max_tokens=200) for seed in range(6)]
    answers = engine.answers(requests)
    expected, prompt = [answer.ids for answer in answers], answers[0].started.prompt_tokens
    alone = [replace(each, request_id=f"{each.request_id}-off", speculation=SpeculationMode.OFF) for each in requests]
    tight = TracedHarness(replace(PAIR, kv_cache_tokens=1536 + 256), Traced)
    try:
        assert [answer.ids for answer in tight.answers(alone)] == expected
        once = sum(prompt + len(ids) - 1 for ids in expected)
        assert tight.target_rows() >= once + prompt, "nobody was paused: every row was made once"
        assert [answer.ids for answer in tight.answers(requests)] == expected
    finally:
        tight.close()


@pytest.mark.slow
def test_a_target_that_drafts_for_itself_is_hardly_ever_wrong_and_says_the_same() -> None:
    harness = EngineHarness(engine_config(Settings(target_dtype="float32", draft_model="self")))
    try:
        answers = {
            mode: harness.answer(ask(f"self-{mode}", PROMPTS[0], [scene_video(1)], speculation=mode, max_tokens=60))
            for mode in MODES
        }
    finally:
        harness.close()
    assert len({answer.ids for answer in answers.values()}) == 1
    stats = answers[SpeculationMode.SERIAL].finished.speculation
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens > 0
