"""`n`: several answers to one question, identified by their index, whole and streamed, in every dialect."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.chat import ask
from tests.api.test_stream import events_of
from tests.api.uploads import ALICE, BOB
from tests.api.world import World, until
from tests.fakes import FINISHED, PROMPT_READY, FakeEngine, Step
from vidspec_service.api.errors import TooManyRequests
from vidspec_service.engine.types import FinishReason, TextDelta

pytestmark = [pytest.mark.api, pytest.mark.anyio]

SCRIPT: tuple[Step, ...] = (
    PROMPT_READY,
    TextDelta(text="A", num_tokens=1, choice=0),
    TextDelta(text="X", num_tokens=2, choice=1),
    replace(FINISHED, choice=1, finish_reason=FinishReason.LENGTH, completion_tokens=2, reasoning_tokens=1),
    TextDelta(text="B", num_tokens=1, choice=0),
    replace(FINISHED, choice=0, completion_tokens=2, reasoning_tokens=2),
)


async def complete(world: World, **fields: Any) -> httpx.Response:
    return await world.client.post("/v1/completions", json={"prompt": "Go on", **fields})


async def every_route(world: World, **fields: Any) -> list[httpx.Response]:
    return [await world.ask(**fields), await ask(world, **fields), await complete(world, **fields)]


def told(choice: dict[str, Any]) -> str:
    text: str = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content", "")
    return text


async def test_a_whole_answer_has_each_in_its_place(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*SCRIPT))
    for response in await every_route(world, n=2, seed=5):
        body = response.json()
        found = [(choice["index"], told(choice), choice["finish_reason"]) for choice in body["choices"]]
        assert found == [(0, "AB", "stop"), (1, "X", "length")]
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (40, 4, 44)
        assert usage["completion_tokens_details"] == {
            "reasoning_tokens": 3, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2,
        }  # fmt: skip
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2, "they have one prompt"
    assert [(request.n, request.sampling.seed) for request in world.engine.requests] == [(2, 5)] * 3
    assert world.metric("prompt_tokens_total") == 3 * 40
    assert world.metric("generation_tokens_total") == 3 * 4
    assert world.metric("request_generation_tokens_count") == 3 * 2
    assert world.metric("request_success_total", finished_reason="stop") == 3
    assert world.metric("prefix_cache_queries_total") == 3 * 40
    assert world.metric("prefix_cache_hits_total") == 3 * 2


async def test_openais_client_puts_each_in_its_place_whichever_begins_first(tmp_path: Path) -> None:
    """It fails or mixes them up where their first chunks are not in order."""
    script: list[Step] = [
        PROMPT_READY,
        *(TextDelta(text=text, num_tokens=1, choice=choice) for choice, text in ((2, "Z"), (1, "X"), (2, "z"))),
        *(replace(FINISHED, choice=choice) for choice in (0, 2, 1)),
    ]
    http: Any = World(tmp_path, FakeEngine(*script)).client
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http)
    asked: Any = {"role": "user", "content": "What moves?"}
    async with client.chat.completions.stream(model="fake-target", messages=[asked], n=3) as stream:
        choices = (await stream.get_final_completion()).choices
    assert [(choice.index, choice.message.content) for choice in choices] == [(0, ""), (1, "X"), (2, "Zz")]


async def test_their_times_are_that_of_the_first_token_and_the_mean_of_those_between(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(*SCRIPT[:2], gate, *SCRIPT[2:]))
    asking = asyncio.create_task(world.ask(n=2))
    await until(lambda: world.engine.num_held == 1)
    gate.set()
    timings = (await asking).json()["timings"]
    assert timings["time_to_first_token_s"] < world.metric("time_to_first_token_seconds_sum") / 2
    between = world.metric("request_time_per_output_token_seconds_sum") / 2
    assert timings["time_per_output_token_s"] == pytest.approx(between, abs=1e-6)


async def test_a_client_that_leaves_before_the_last_has_ended_has_no_answer(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*SCRIPT[:4], asyncio.Event()))
    asking = asyncio.create_task(ask(world, n=2))
    await until(lambda: world.metric("request_generation_tokens_count") == 1)
    asking.cancel()
    await until(lambda: world.metric("request_success_total", finished_reason="abort") == 1)


async def test_a_streams_chunks_say_whose_they_are(tmp_path: Path) -> None:
    for response in await every_route(World(tmp_path, FakeEngine(*SCRIPT)), n=2, stream=True):
        choices = [choice for event in events_of(response.text)[:-1] for choice in event["choices"]]
        texts = ["".join(told(choice) for choice in choices if choice["index"] == index) for index in range(2)]
        assert texts == ["AB", "X"]
        ends = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
        assert ends == [(1, "length"), (0, "stop")]
        roles = [choice["index"] for choice in choices if choice.get("delta", {}).get("role")]
        assert roles in ([0, 1], [])


async def test_one_that_never_ends_fails_the_request(tmp_path: Path) -> None:
    response = await ask(World(tmp_path, FakeEngine(*SCRIPT[:-1])), n=2)
    assert response.status_code == 500


@pytest.mark.parametrize("n", [0, 9, -1, "many"])
async def test_a_wrong_n_is_a_400_that_says_why(tmp_path: Path, n: object) -> None:
    for response in await every_route(World(tmp_path), n=n):
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_more_than_can_be_generated_at_once_is_a_400_with_the_limit(tmp_path: Path) -> None:
    for settings, limit in (
        ({"max_running_requests": 3}, r"limit is 3 .*VIDSPEC_MAX_RUNNING_REQUESTS"),
        ({"max_requests_per_key": 2}, r"limit is 2 .*VIDSPEC_MAX_REQUESTS_PER_KEY"),
    ):
        world = World(tmp_path, FakeEngine(*SCRIPT), **settings)  # type: ignore[arg-type]
        for response in await every_route(world, n=4):
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "n")
            assert re.search(limit, error["message"])
        assert (await ask(world, n=2)).status_code == 200


async def test_each_answer_takes_a_place(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(*SCRIPT[:2], gate, *SCRIPT[2:]), max_running_requests=4, max_queued_requests=0)
    running = asyncio.create_task(ask(world, n=2))
    await until(lambda: world.admission.num_admitted == 2)
    full = await ask(world, n=3)
    assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
    assert "3 of 4 places" in full.json()["error"]["message"]
    gate.set()
    assert (await running).status_code == 200
    assert world.admission.num_admitted == 0


async def test_an_answer_that_has_ended_before_the_others_does_not_wait(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(*SCRIPT[:4], gate, *SCRIPT[4:]))
    running = asyncio.create_task(ask(world, n=2))
    await until(lambda: world.metric("request_generation_tokens_count") == 1)
    await world.client.get("/metrics")
    gate.set()
    assert (await running).status_code == 200
    assert (world.metric("num_requests_running"), world.metric("num_requests_waiting")) == (1, 0)


async def test_a_caller_without_another_request_may_have_as_many_answers_as_are_generated_at_a_time(
    tmp_path: Path,
) -> None:
    admission = World(tmp_path, max_running_requests=4, max_queued_requests=0).admission
    with admission.permit("", "10.0.0.1") as first:
        with admission.permit("", "10.0.0.1") as second, pytest.raises(TooManyRequests):
            second.hold_places(3)
        first.hold_places(4)
        assert admission.num_admitted == 4


@pytest.mark.parametrize("limits", [{"max_requests_per_key": 6}, {"keys": [ALICE, BOB]}])
async def test_each_answer_counts_against_what_one_caller_may_have(tmp_path: Path, limits: dict[str, Any]) -> None:
    admission = World(tmp_path, max_running_requests=4, max_queued_requests=4, **limits).admission
    with admission.permit("a", "a") as first, admission.permit("a", "a") as second:
        first.hold_places(3)
        with pytest.raises(TooManyRequests):
            second.hold_places(4)
        second.hold_places(3)
