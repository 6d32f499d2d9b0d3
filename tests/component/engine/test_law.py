"""Whatever sampling parameters a request has: the same ids and the same log probabilities in every mode."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, ask, lasting, scene_video, unsure_video
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode
from vidspec_service.engine.types import Finished, FinishReason, TextDelta, TokenLogprob
from vidspec_service.errors import InvalidRequest

MODES = (SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)
LAWS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 1.8, "frequency_penalty": 1.2},
    # neither "Everything" nor "The", with which captions begin, nor " the", which is in each of them
    "bias": {"logit_bias": ((531, -100.0), (320, -100.0), (263, -100.0), (577, 3.0), (498, 1.5))},
    "bad words": {"bad_words": ("red", "circle", "the", "moves")},
    "min-p": {"min_p": 0.2},
    "min tokens": {"min_tokens": 30},
    "ignore eos": {"ignore_eos": True},
    "stop tokens": {"stop_token_ids": (18, 271, 498, 510)},
}


def question(  # two frames: the law does not depend on the video, and prefill takes most of the time
    name: str, law: dict[str, Any], mode: SpeculationMode, temperature: float = 0.8, seed: int = 1, logprobs: int = 3
) -> GenerationRequest:
    sampling = {key: value for key, value in law.items() if key in SamplingParams.__dataclass_fields__}
    others = {key: value for key, value in law.items() if key not in sampling}
    video = unsure_video(seed, 2) if seed % 3 == 2 else scene_video(seed, 2)
    text = "How many objects are there?" if law.keys() & {"min_tokens", "ignore_eos"} else "Describe the video."
    request = ask(
        f"{name}-{mode}-{temperature}-{seed}", text, [video], speculation=mode, max_tokens=40,
        sampling=SamplingParams(temperature=temperature, seed=seed, **sampling),
    )  # fmt: skip
    return replace(request, logprobs=logprobs, **others)


Told = tuple[tuple[int, ...], tuple[TokenLogprob, ...], FinishReason, str]


async def told(engine: EngineHarness, request: GenerationRequest, begun: asyncio.Event | None = None) -> Told:
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    text = ""
    async for event in engine.engine.generate(request):
        if isinstance(event, TextDelta):
            ids, logprobs, text = ids + event.ids, logprobs + event.logprobs, text + event.text
            if begun is not None:
                begun.set()
        elif isinstance(event, Finished):
            return ids, logprobs, event.finish_reason, text
    raise AssertionError("the generation ended without Finished")


@pytest.mark.slow  # another test runs all of them at once
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_every_mode_gives_the_same_ids_and_log_probabilities(
    engine: EngineHarness, law: dict[str, Any], temperature: float
) -> None:
    for seed in (1, 2):
        asked = [question("one", law, mode, temperature, seed) for mode in MODES]
        found = [engine.run(told(engine, request)) for request in asked]
        assert found[0] == found[1] == found[2] == found[3]
        assert len(found[0][1]) == len(found[0][0])


def test_each_law_changes_the_answer(engine: EngineHarness) -> None:
    """Otherwise the tests here would pass without the law."""

    async def answers(requests: Iterable[GenerationRequest]) -> list[Told]:
        return await asyncio.gather(*(told(engine, request) for request in requests))

    def without(request: GenerationRequest) -> GenerationRequest:
        law = SamplingParams(temperature=request.sampling.temperature, seed=request.sampling.seed)
        name = f"{request.turns[0].text} {law.seed}"
        return ask(name, request.turns[0].text, request.videos, speculation=MODES[0], max_tokens=40, sampling=law)

    # With an unsure model: a sure one gives the same answer under a light penalty.
    asked = [question(name, law, MODES[0], 1.5, seed) for name, law in LAWS.items() for seed in (14, 17)]
    plain = {other.request_id: other for other in map(without, asked)}
    unchanged = dict(zip(plain, engine.run(answers(plain.values())), strict=True))
    changed = zip(asked, engine.run(answers(asked)), strict=True)
    has_changed = [answer[0] != unchanged[without(request).request_id][0] for request, answer in changed]
    for place, name in enumerate(LAWS):
        assert any(has_changed[2 * place : 2 * place + 2]), name


def test_all_laws_at_once_do_not_disturb_each_other(engine: EngineHarness) -> None:
    laws = list(LAWS.items())
    alone = [engine.run(told(engine, question(name, law, MODES[0], seed=3))) for name, law in laws]

    async def together(tag: str, shift: int) -> list[Told]:
        asked = [
            replace(question(name, law, MODES[(place + shift) % 4], seed=3), request_id=f"{tag}{place}")
            for place, (name, law) in enumerate(laws)
        ]
        return await asyncio.gather(*(told(engine, request) for request in asked))

    for shift in range(2):
        assert engine.run(together(f"together {shift} ", shift)) == alone


@pytest.mark.timeout(300)  # after a target died, its requests are retried one by one
def test_a_killed_target_changes_neither_ids_nor_log_probabilities() -> None:
    harness = EngineHarness(PAIR)
    try:
        laws = list(LAWS.values())
        asked = [question(f"k{place}", law, MODES[2]) for place, law in enumerate(laws)]

        async def undisturbed() -> list[Told]:
            return await asyncio.gather(
                *(told(harness, replace(each, request_id=f"u{each.request_id}")) for each in asked)
            )

        async def disturbed() -> list[Told]:
            begun = [asyncio.Event() for _ in asked]
            streams = [
                asyncio.ensure_future(told(harness, request, event))
                for request, event in zip(asked, begun, strict=True)
            ]
            await begun[0].wait()
            pid = harness.engine.worker_pids()["target"]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            return await asyncio.gather(*streams)

        expected = harness.run(undisturbed(), timeout_s=110)
        assert harness.run(disturbed(), timeout_s=110) == expected
    finally:
        harness.close()


def test_log_probabilities_are_the_models_own_before_the_law(engine: EngineHarness) -> None:
    """Compares with stock transformers, which gets the same answer as input."""
    from vidspec_models.reference.stock import StockGenerator

    request = question("stock", LAWS["repetition"], MODES[2], logprobs=20)
    ids, logprobs, _, _ = engine.run(told(engine, request))
    stock = StockGenerator(ModelSpec(path="bundled", role="target", dtype="float32"))
    inputs = stock._inputs(request.turns, request.videos)
    num_prompt = inputs["input_ids"].shape[1]
    answer = torch.tensor([ids])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.inference_mode():
        rows = stock._model(**inputs).logits[0, num_prompt - 1 : -1].log_softmax(-1)
    num_tokens = len(stock._processor.tokenizer)  # without the rows that only pad the matrix
    for row, token, each in zip(rows, ids, logprobs, strict=True):
        assert each.token.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert [top.logprob for top in each.top] == pytest.approx(row[:num_tokens].topk(20).values.tolist(), abs=1e-3)


def test_bad_words_do_not_come_and_ends_come_when_they_may(engine: EngineHarness) -> None:
    for seed in (1, 2, 3):
        text = engine.run(told(engine, question("bad", LAWS["bad words"], MODES[2], seed=seed)))[3].split()
        assert not {"red", "circle", "the", "moves"} & {word.strip(".,") for word in text}
    long, _, reason, _ = engine.run(told(engine, question("long", LAWS["ignore eos"], MODES[2])))
    assert (len(long), reason) == (40, FinishReason.LENGTH)
    assert len(engine.run(told(engine, question("least", LAWS["min tokens"], MODES[2])))[0]) >= 30


def test_a_stop_token_ends_the_answer_and_is_not_in_it(engine: EngineHarness) -> None:
    plain = question("plain", {}, MODES[0], temperature=0.0)
    ids, logprobs, _, text = engine.run(told(engine, plain))
    place = next(i for i in range(3, len(ids)) if ids[i] not in ids[:i])
    stopped = replace(plain, request_id="stopped", stop_token_ids=(ids[place],), speculation=MODES[2])
    found = engine.run(told(engine, stopped))
    assert found[:3] == (ids[: place + 1], logprobs[: place + 1], FinishReason.STOP)
    before = b"".join(each.token.text for each in logprobs[:place]).decode()
    assert found[3] == before
    assert text.startswith(before)


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_a_token_that_the_model_does_not_have_is_refused(engine: EngineHarness, field: str) -> None:
    law = {"stop_token_ids": (1, 2**31 - 1)} if field == "stop_token_ids" else {"logit_bias": ((2**31 - 1, 1.0),)}
    with pytest.raises(InvalidRequest, match=f"{field}: the model has no token 2147483647") as caught:
        engine.run(told(engine, question("none", law, MODES[0])))
    assert caught.value.param == field


def test_a_prompts_tokens_are_the_targets_even_where_the_draft_sees_fewer(engine: EngineHarness) -> None:
    """Both models penalise the tokens of the target's prompt, so that proposals are still accepted."""
    answer = engine.answer(
        lasting(replace(question("sees", LAWS["repetition"], MODES[2], temperature=0.0), logprobs=None))
    )
    assert answer.finished.speculation.num_accepted_tokens > 0
