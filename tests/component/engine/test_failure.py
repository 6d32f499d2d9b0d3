"""Failures cost speed, never an answer: workers killed, hung or refused; clients that disconnect."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from psutil import Process, pid_exists

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, ask, collect, lasting, scene_video, unsure_video
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode
from vidspec_service.engine.config import WorkerConfig
from vidspec_service.engine.frontend.interface import WorkerState
from vidspec_service.engine.frontend.supervisor import WorkerLauncher
from vidspec_service.engine.types import TextDelta
from vidspec_service.errors import ConfigError, ContextLengthExceeded

LAW = SamplingParams(temperature=0.5, seed=3)  # captions of about 70 tokens: long enough to be disturbed


@pytest.fixture(scope="module")
def fragile() -> Iterator[EngineHarness]:
    """A separate engine with a short timeout for hung workers."""
    harness = EngineHarness(replace(PAIR, silence_s=3.0))
    yield harness
    harness.close()


def undisturbed(harness: EngineHarness, count: int) -> list[tuple[int, ...]]:
    requests = [
        ask(f"u{i}", "Describe the video.", [scene_video(i, 2)], sampling=LAW, max_tokens=120) for i in range(count)
    ]
    return [answer.ids for answer in harness.answers(requests)]


def disturbed(harness: EngineHarness, count: int, victim: str | int, sign: signal.Signals) -> list[tuple[int, ...]]:
    """The answers of `count` requests; the worker or process gets the signal once every stream has begun."""

    async def run() -> list[tuple[int, ...]]:
        begun = [asyncio.Event() for _ in range(count)]

        async def stream(i: int) -> tuple[int, ...]:
            ids: tuple[int, ...] = ()
            request = ask(f"d{i}", "Describe the video.", [scene_video(i, 2)], sampling=LAW, max_tokens=120)
            async for event in harness.engine.generate(request):
                if isinstance(event, TextDelta):
                    ids += event.ids
                    begun[i].set()
            return ids

        streams = [asyncio.ensure_future(stream(i)) for i in range(count)]
        for event in begun:
            await event.wait()
        pid = harness.engine.worker_pids()[victim] if isinstance(victim, str) else victim
        assert pid is not None
        os.kill(pid, sign)
        return await asyncio.gather(*streams)

    return harness.run(run(), timeout_s=110)


PAYLOADS = "/memfd:vidspec-request (deleted)"


def descriptors() -> Counter[str]:
    """Open file descriptors of this process, by kind: sockets, pipes, payloads, files."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own descriptor
            kinds[re.sub(r":\[\d+\]$", "", os.readlink(f"/proc/self/fd/{name}"))] += 1
    return kinds


# Must run before there is a `fragile` engine: a worker of that engine that restarts meanwhile would be counted too.
def test_many_cancels_leave_nothing_behind(engine: EngineHarness) -> None:
    async def cancel_soon(request: GenerationRequest, after_s: float) -> None:
        task = asyncio.ensure_future(collect(engine.engine, request))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def many(tag: str) -> Counter[str]:
        requests = [ask(f"{tag}{i}", "Describe the video.", [unsure_video(i, 2)], max_tokens=500) for i in range(20)]
        await asyncio.gather(*(cancel_soon(request, 0.01 * (i % 7)) for i, request in enumerate(requests)))
        with suppress(TimeoutError):
            async with asyncio.timeout(20):
                # A thread closes a payload once it has written it; there is no event for that.
                while descriptors()[PAYLOADS]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        return descriptors()

    before = engine.run(many("warm-up"))
    assert not before[PAYLOADS]
    assert not engine.run(many("c")) - before
    assert engine.answer(ask("then", "Hello.", [], max_tokens=2)).finished.completion_tokens >= 1
    status = engine.engine.status()
    assert (status.num_running, status.num_waiting) == (0, 0)
    assert not descriptors() - before


@pytest.mark.parametrize(
    ("role", "sign"),
    [
        pytest.param("target", signal.SIGKILL, id="killed-target"),
        pytest.param("draft", signal.SIGSTOP, id="hung-draft"),
        pytest.param("draft", signal.SIGKILL, id="killed-draft", marks=pytest.mark.slow),
        pytest.param("target", signal.SIGSTOP, id="hung-target", marks=pytest.mark.slow),
    ],
)
def test_streams_survive_a_lost_worker_with_the_same_text(
    fragile: EngineHarness, role: str, sign: signal.Signals
) -> None:
    expected = undisturbed(fragile, 3)
    lost = fragile.engine.worker_pids()[role]
    assert disturbed(fragile, 3, role, sign) == expected
    fragile.wait_until_replaced(role, lost)
    request = ask("after", "Describe the video.", [scene_video(0, 2)], sampling=LAW, max_tokens=120)
    request = replace(request, speculation=SpeculationMode.PARALLEL)
    assert fragile.answer(request).ids == expected[0]
    again = fragile.answer(lasting(replace(request, request_id="longer")))
    assert again.finished.speculation.num_draft_tokens > 0, "the draft did not come back"
    draft, cores = fragile.engine.worker_pids()["draft"], os.sched_getaffinity(0)
    assert draft is not None
    assert len(os.sched_getaffinity(draft)) == max(len(cores) - 1, 1), "the draft was not kept off the target's core"


@pytest.mark.slow
def test_streams_survive_the_loss_of_the_process_that_workers_are_forked_from() -> None:
    launcher = WorkerLauncher("text")
    engine = EngineHarness(PAIR, launcher=launcher)
    try:
        expected = undisturbed(engine, 2)
        before = engine.engine.worker_pids()
        fork_server = Process(before["target"]).parent()
        assert fork_server is not None
        assert fork_server.pid == Process(before["draft"]).ppid() != os.getpid()
        assert disturbed(engine, 2, fork_server.pid, signal.SIGKILL) == expected
        engine.wait_until_ready()
        after = engine.engine.worker_pids()
        assert not set(before.values()) & set(after.values())
    finally:
        engine.close()
        launcher.close()


def test_a_request_made_while_the_target_restarts_waits_for_it(fragile: EngineHarness) -> None:
    fragile.wait_until_ready()
    fragile.kill("target")
    answer = fragile.answer(ask("early", "Describe the video.", [unsure_video(0)], sampling=LAW, max_tokens=10))
    assert 0 < len(answer.ids) <= 10


def test_workers_wait_for_an_api_process_that_pauses(engine: EngineHarness) -> None:
    """A target that went on had filled the events' channel within a fifth of a second, and ended."""
    workers = engine.engine.worker_pids()

    async def pause() -> None:
        begun = [asyncio.Event() for _ in range(16)]

        async def stream(i: int) -> None:
            law = SamplingParams(temperature=0.5, seed=i)
            request = ask(f"pause{i}", "Describe the video.", [scene_video(1, 2)], sampling=law, max_tokens=1000)
            async for event in engine.engine.generate(replace(request, ignore_eos=True)):
                if isinstance(event, TextDelta):
                    begun[i].set()

        streams = [asyncio.ensure_future(stream(i)) for i in range(len(begun))]
        for event in begun:
            await event.wait()
        time.sleep(2.0)  # noqa: ASYNC251, TID251  the loop stands still
        for event in begun:
            event.clear()
        for event in begun:
            await event.wait()
        for each in streams:
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    engine.run(pause())
    assert engine.engine.worker_pids() == workers


def test_workers_let_the_api_compute_first_and_go_before_it_but_after_a_decoder_when_memory_runs_out(
    engine: EngineHarness,
) -> None:
    """The kernel adds so many thousandths of the memory to what each holds; a decode child's score is 1000."""
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    for pid in engine.engine.worker_pids().values():
        score = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
        assert score == max(ours, 1000 - 800), "a worker may hold four fifths of the memory"
        assert os.getpriority(os.PRIO_PROCESS, pid or 0) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)


def test_leaving_a_stream_frees_it_on_the_workers(engine: EngineHarness) -> None:
    async def leave_early() -> None:
        stream = engine.engine.generate(ask("left", "Describe the video.", [unsure_video(1)], max_tokens=4000))
        async for event in stream:
            if isinstance(event, TextDelta):
                break
        await stream.aclose()

    engine.run(leave_early())
    assert engine.engine.status().num_running == 0
    # The workers take new requests at once: if the stream were still running, 4000 tokens would come first.
    answers = engine.answers([ask(f"n{i}", "Hello.", [], max_tokens=3) for i in range(16)])
    assert all(answer.finished.completion_tokens <= 3 for answer in answers)


def test_a_prompt_beyond_the_context_is_refused_with_its_size(engine: EngineHarness) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"513 of them video.*context of 16384"):
        engine.answer(ask("long", "Describe the video.", [unsure_video(0)], max_tokens=16_000))


def test_a_model_that_does_not_exist_is_one_readable_error() -> None:
    config = replace(PAIR, target=WorkerConfig(model="/no/such/model"))
    with pytest.raises(ConfigError, match="is neither a folder"):
        EngineHarness(config)


def test_a_cache_without_room_for_a_token_is_one_readable_error() -> None:
    with pytest.raises(ConfigError, match=r"no room for a prompt: kv_cache_tokens must be \d+ or more"):
        EngineHarness(replace(PAIR, draft=None, kv_cache_tokens=1))


def test_workers_end_with_the_engine() -> None:
    harness = EngineHarness(replace(PAIR, draft=None))
    pids = [pid for pid in harness.engine.worker_pids().values() if pid is not None]
    harness.close()
    assert harness.engine.status().workers == {"target": WorkerState.DEAD}
    assert pids

    async def until_gone() -> None:
        while any(pid_exists(pid) for pid in pids):  # noqa: ASYNC110 - no event for a process that is not ours
            await asyncio.sleep(0.01)

    # They have ended already; the fork server may not have waited for them yet.
    asyncio.run(asyncio.wait_for(until_gone(), 5))
