"""Compression on the target: may change the text, but equally in every mode; applies only to requests that ask."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, ask, lasting, scene_video, unsure_video
from vidspec_models.compression import REFRESH_TOKENS
from vidspec_models.request import Compression, GenerationRequest, SamplingParams, SpeculationMode, Video
from vidspec_service.engine.types import TextDelta

MODES = (SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)
WARM = SamplingParams(temperature=1.0, seed=7)
HOT = SamplingParams(temperature=2.0, seed=7)  # gives long answers
CELLS = 64  # tokens of a frame


def compressed(
    name: str,
    video: Video,
    *,
    sampling: SamplingParams = WARM,
    speculation: SpeculationMode = SpeculationMode.AUTO,
    max_tokens: int = 70,
    compression: Compression = Compression.DYCOKE,
) -> GenerationRequest:
    request = ask(name, "Describe the video.", [video], sampling=sampling, speculation=speculation)
    return replace(request, max_tokens=max_tokens, compression=compression)


def plain(request: GenerationRequest) -> GenerationRequest:
    return replace(request, request_id=f"plain-{request.request_id}", compression=Compression.NONE)


@pytest.mark.parametrize(
    ("num_frames", "sampling"), [(8, SamplingParams()), (17, WARM)], ids=["8 frames, greedy", "17 frames, sampled"]
)
def test_every_mode_gives_the_compressed_targets_own_ids(
    engine: EngineHarness, num_frames: int, sampling: SamplingParams
) -> None:
    video = unsure_video(num_frames, num_frames)
    answers = {
        mode: engine.answer(lasting(compressed(f"{mode}-{num_frames}", video, sampling=sampling, speculation=mode)))
        for mode in MODES
    }
    assert len({answer.ids for answer in answers.values()}) == 1, answers
    stats = answers[SpeculationMode.PARALLEL].finished.speculation
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("compression", [Compression.V_CAST, Compression.VIDCOM2, Compression.EARLYTOM])
def test_every_mode_gives_the_ids_of_a_target_with_fewer_tokens(
    engine: EngineHarness, compression: Compression
) -> None:  # fmt: skip
    video = unsure_video(3)
    ids = {
        mode: engine.answer(
            lasting(compressed(f"{compression}-{mode}", video, speculation=mode, compression=compression))
        ).ids
        for mode in (SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL)  # AUTO chooses one of them
    }
    assert len(set(ids.values())) == 1, ids


def test_compressed_and_plain_requests_at_once_get_what_they_get_alone(engine: EngineHarness) -> None:
    methods = (Compression.DYCOKE, Compression.V_CAST, Compression.VIDCOM2, Compression.EARLYTOM)
    requests = [
        compressed(f"alone-{i}", unsure_video(i), speculation=MODES[i], compression=methods[i]) for i in range(4)
    ]
    requests += [plain(request) for request in requests]
    alone = [engine.answer(request).ids for request in requests]
    again = [replace(request, request_id=f"again-{request.request_id}") for request in requests]
    assert [answer.ids for answer in engine.answers(again)] == alone
    assert alone[:4] != alone[4:]


def test_the_target_sees_fewer_video_tokens_only_if_asked(engine: EngineHarness) -> None:
    request = compressed("fewer", scene_video(1), max_tokens=2)
    fewer, all_of_them = engine.answer(request).started, engine.answer(plain(request)).started
    assert all_of_them.video_tokens == 8 * CELLS + 1
    assert fewer.video_tokens == 2 * (CELLS + 3 * CELLS // 2) + 1
    v_cast = engine.answer(
        replace(request, request_id="ratio", compression=Compression.V_CAST, compression_ratio=0.375)
    )
    assert v_cast.started.video_tokens == 8 * CELLS * 3 // 8 + 1
    merged = engine.answer(
        replace(request, request_id="merged", compression=Compression.EARLYTOM, compression_ratio=0.375)
    )
    assert abs(merged.started.video_tokens - v_cast.started.video_tokens) <= 8  # the same number for every frame
    assert all_of_them.prompt_tokens - fewer.prompt_tokens == all_of_them.video_tokens - fewer.video_tokens


def test_a_conversation_without_a_video_and_a_video_of_one_frame_are_answered(engine: EngineHarness) -> None:
    for name, videos, expected in (("none", [], 0), ("one", [unsure_video(1, 1)], CELLS + 1)):
        request = replace(ask(f"little-{name}", "Hello.", videos, max_tokens=4), compression=Compression.DYCOKE)
        assert engine.answer(request).started.video_tokens == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_paused_requests_and_those_of_a_killed_target_come_back_to_the_same_text(engine: EngineHarness) -> None:
    requests = [compressed(f"p{seed}", unsure_video(seed), sampling=HOT, max_tokens=120) for seed in range(4)]
    expected = [answer.ids for answer in engine.answers(requests)]
    tight = EngineHarness(replace(PAIR, kv_cache_tokens=1024 + 256))
    try:
        assert [answer.ids for answer in tight.answers(requests)] == expected
        assert tight.run(answered_across_a_death(tight, requests), timeout_s=180) == expected
    finally:
        tight.close()


async def answered_across_a_death(harness: EngineHarness, requests: list[GenerationRequest]) -> list[tuple[int, ...]]:
    """Kill the target once a request has tokens well beyond its first selection of rows."""
    has_some = asyncio.Event()

    async def stream(request: GenerationRequest) -> tuple[int, ...]:
        ids: tuple[int, ...] = ()
        async for event in harness.engine.generate(request):
            if isinstance(event, TextDelta):
                ids += event.ids
            if len(ids) > 2 * REFRESH_TOKENS:
                has_some.set()
        has_some.set()  # even if the answers are short: never wait forever
        return ids

    streams = [asyncio.ensure_future(stream(request)) for request in requests]
    await has_some.wait()
    harness.kill("target")
    return await asyncio.gather(*streams)
