"""The engine as the API process sees it, with workers scripted by the test: who is told what, and when."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, models

from tests.fakes import MEMORY
from tests.unit.engine.test_kv_budget import on
from tests.unit.engine.test_kv_budget import worker as memory_of
from vidspec_models.request import GenerationRequest, SpeculationMode, Turn
from vidspec_models.step_path import COMPILED
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.frontend import local_engine
from vidspec_service.engine.frontend.interface import WorkerState
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.frontend.request_table import CLEARED_AFTER
from vidspec_service.engine.frontend.supervisor import WorkerLauncher
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import (
    Cancel,
    Configure,
    Ended,
    Follow,
    Generate,
    Heartbeat,
    Loaded,
    Message,
    Peer,
    Ready,
    Rejected,
    Tokens,
)
from vidspec_service.engine.ipc.payload import read_ids, read_request
from vidspec_service.engine.types import Finished, FinishReason, GenerationEvent, PromptReady, RejectReason, TextDelta
from vidspec_service.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    ServiceError,
)
from vidspec_service.telemetry import Metrics

pytestmark = [pytest.mark.unit, pytest.mark.anyio]

AUTO, PARALLEL, SERIAL, OFF = SpeculationMode
ALONE = EngineConfig(target=WorkerConfig(model="of/none"))
PAIR = EngineConfig(target=WorkerConfig(model="of/none"), draft=WorkerConfig(model="of/none"))
WORDS = [f"w{number}" for number in range(50)]
M = TypeVar("M")


class FakeWorker:
    """Ready at once; records its messages, with its own copies of their file descriptors."""

    vocabulary: dict[str, list[str]]
    folder: Path
    starts = True
    is_full = False  # it does not read
    facts: Mapping[str, Mapping[str, str]] = {}  # role → fields of its Ready message

    def __init__(self, config: Configure, launcher: WorkerLauncher, owner: LocalEngine) -> None:
        self.role = config.role
        self.pid = {"target": 1, "draft": 2}[config.role]
        self.state = WorkerState.STARTING
        self.heard: list[Message] = []
        self.asked: list[GenerationRequest] = []  # read from the shared memory of each Generate
        self.last_fds: list[int] = []
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._owner: Any = owner

    def start(self) -> None:
        if self.starts:
            asyncio.get_running_loop().call_soon(self.be_ready)

    def be_ready(self) -> None:
        path = self.folder / f"{self.role}.json"
        words = {word: number for number, word in enumerate(self.vocabulary[self.role])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.enable_truncation(1)  # as after a training's last batch
        tokenizer.enable_padding(length=4)
        tokenizer.save(str(path))
        self.state = WorkerState.READY
        ready = Ready(
            context_length=100, kv_cache_tokens=65536, default_num_frames=8, device="cpu", dtype="float32",
            tokenizer_file=str(path), is_batch_invariant=True, memory=MEMORY, versions={},
        )  # fmt: skip
        self._owner.on_worker_ready(self, structs.replace(ready, **self.facts.get(self.role, {})))

    def lose(self) -> bool:
        """Report that the process has died; the worker is ready again when the test says so."""
        self.state = WorkerState.STARTING
        return bool(self._owner.on_worker_lost(self))

    def die(self, reason: str) -> None:
        self.state = WorkerState.DEAD
        self._owner.on_worker_dead(self, reason)

    def say(self, message: Message) -> None:
        self._owner.on_worker_message(self, message)

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> bool:
        if self.is_full or self.state is not WorkerState.READY:
            return False
        self._inbox.put_nowait(message)
        self.last_fds = [os.dup(fd) for fd in fds]
        if isinstance(message, Generate):
            committed = read_ids(self.last_fds.pop()) if message.has_committed else ()
            asked = read_request(self.last_fds)  # which closes the file descriptors
            self.asked.append(replace(asked, committed=(*asked.committed, *committed)))
        return True

    def cancel(self, request_id: str) -> None:
        self.send(Cancel(request_id=request_id))

    async def stop(self) -> None:
        self.state = WorkerState.DEAD

    async def next(self, kind: type[M]) -> M:
        """Wait for the next message of a kind."""
        async with asyncio.timeout(10):
            while True:
                self.heard.append(message := await self._inbox.get())
                if isinstance(message, kind):
                    return message

    def of(self, kind: type[M]) -> list[M]:
        """All messages of a kind so far."""
        while not self._inbox.empty():
            self.heard.append(self._inbox.get_nowait())
        return [message for message in self.heard if isinstance(message, kind)]

    def commits(self, name: str, *ids: int, **counts: Any) -> None:
        self.say(Tokens(request_id=name, ids=ids, **counts))

    def accepts(self, name: str) -> None:
        self.say(
            PromptReady(request_id=name, prompt_tokens=7, video_tokens=5, queue_s=0.1, prepare_s=0.2)
        )  # fmt: skip

    def ends(self, name: str, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.say(Ended(request_id=name, finish_reason=reason))


class Stream:
    """One answer, read by a task as it arrives."""

    def __init__(self, engine: LocalEngine, request: GenerationRequest) -> None:
        self.events: list[GenerationEvent] = []
        self._generator = engine.generate(request)
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for event in self._generator:
            self.events.append(event)

    async def ended(self) -> list[int]:
        """Wait for the end and return the ids; raises what the generation raised."""
        async with asyncio.timeout(10):
            await self.task
        assert isinstance(self.events[0], PromptReady)
        assert isinstance(self.events[-1], Finished)
        assert not any(isinstance(event, PromptReady | Finished) for event in self.events[1:-1])
        return self.ids

    async def leave(self) -> None:
        """Leave as a client that disconnects."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._generator.aclose()

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, TextDelta) for token in event.ids]

    @property
    def finished(self) -> Finished:
        event = self.events[-1]
        assert isinstance(event, Finished)
        return event


@dataclass
class Engine:
    """The engine's client and its workers; a draft must not be asked for if there is none."""

    client: LocalEngine
    registry: CollectorRegistry

    def worker(self, role: str) -> FakeWorker:
        worker: Any = self.client._workers[role]
        assert isinstance(worker, FakeWorker)
        return worker

    @property
    def target(self) -> FakeWorker:
        return self.worker("target")

    @property
    def draft(self) -> FakeWorker:
        return self.worker("draft")

    async def begin(self, name: str, **changes: Any) -> Stream:
        """Submit a request and wait until the target has it."""
        stream = Stream(self.client, request(name, **changes))
        assert (await self.target.next(Generate)).request_id == name
        self.target.accepts(name)
        return stream


def request(name: str, **changes: Any) -> GenerationRequest:
    return GenerationRequest(request_id=name, turns=(Turn(role="user", parts=("what?",)),), **changes)


Start = Callable[..., Any]


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """An engine whose workers are fakes."""
    monkeypatch.setattr(local_engine, "WorkerSupervisor", FakeWorker)
    monkeypatch.setattr(FakeWorker, "folder", tmp_path, raising=False)
    monkeypatch.setattr(FakeWorker, "vocabulary", {"target": WORDS, "draft": WORDS}, raising=False)

    @asynccontextmanager
    async def start(config: EngineConfig = PAIR) -> AsyncIterator[Engine]:
        registry = CollectorRegistry()
        async with LocalEngine(config, Metrics(registry)) as started:
            yield Engine(started, registry)

    return start


async def test_a_device_without_room_for_a_context_ends_the_start(
    engine_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(worker: FakeWorker) -> None:
        worker._owner.on_worker_loaded(worker, Loaded(memory=memory_of(on(free=1.0))))

    monkeypatch.setattr(FakeWorker, "be_ready", load)
    with pytest.raises(ConfigError, match="the target has no room for one context on cuda:0"):
        async with engine_of(ALONE):
            pass


async def test_a_draft_on_the_cpu_that_loads_last_ends_the_start_if_the_target_has_no_room(
    engine_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(worker: FakeWorker) -> None:
        device = {"target": on(free=1.0), "draft": on("cpu")}[worker.role]
        worker._owner.on_worker_loaded(worker, Loaded(memory=memory_of(device)))

    monkeypatch.setattr(FakeWorker, "be_ready", load)
    with pytest.raises(ConfigError, match="the target has no room for one context on cuda:0"):
        async with engine_of(replace(PAIR, start_timeout_s=10.0)):
            pass


async def test_every_answer_gets_its_own_events_in_order_and_the_draft_hears_of_its_end(engine_of: Start) -> None:
    async with engine_of() as engine:
        a, b = await engine.begin("a", max_tokens=3), await engine.begin("b", max_tokens=2)
        for name, ids in (("a", (1,)), ("b", (9,)), ("a", (2, 3)), ("b", (8,)), ("nobody", (7,))):
            engine.target.commits(name, *ids)
        engine.target.ends("b", FinishReason.STOP)
        engine.target.ends("a")
        assert (await a.ended(), await b.ended()) == ([1, 2, 3], [9, 8])
        assert (a.finished.finish_reason, b.finished.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
        assert a.finished.completion_tokens == 3
        assert not engine.target.of(Cancel)
        assert {cancel.request_id for cancel in engine.draft.of(Cancel)} == {"a", "b"}
        assert engine.client.status().num_running == engine.client.status().num_waiting == 0
        assert engine.client.status().step_paths == {"target": COMPILED, "draft": COMPILED}


async def test_the_draft_is_given_a_request_before_the_target_is(
    engine_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, type[Message]]] = []
    send = FakeWorker.send

    def noted(worker: FakeWorker, message: Message, fds: tuple[int, ...] = ()) -> bool:
        told.append((worker.role, type(message)))
        assert isinstance(message, Cancel) or len(fds) == 1
        return send(worker, message, fds)

    async with engine_of() as engine:
        monkeypatch.setattr(FakeWorker, "send", noted)
        stream = await engine.begin("a")
        assert told == [("draft", Generate), ("target", Generate)]
        await stream.leave()


@pytest.mark.parametrize(
    ("config", "server", "asked", "used"),
    [
        (PAIR, AUTO, AUTO, AUTO),
        (PAIR, SERIAL, AUTO, SERIAL),
        (PAIR, OFF, AUTO, OFF),
        (PAIR, OFF, PARALLEL, PARALLEL),
        (PAIR, PARALLEL, OFF, OFF),
        (ALONE, PARALLEL, AUTO, OFF),
        (ALONE, AUTO, PARALLEL, OFF),
    ],
)
async def test_the_mode_is_the_requests_then_the_servers_and_off_without_a_draft(
    engine_of: Start, config: EngineConfig, server: SpeculationMode, asked: SpeculationMode, used: SpeculationMode
) -> None:
    async with engine_of(replace(config, speculation=server)) as engine:
        stream = await engine.begin("a", speculation=asked)
        assert [each.speculation for each in engine.target.asked] == [used]
        if config is PAIR:
            assert [each.request_id for each in engine.draft.of(Generate)] == (["a"] if used is not OFF else [])
        engine.target.ends("a")
        await stream.ended()


async def test_the_next_target_takes_an_answer_up_where_the_last_one_left_it(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = await engine.begin("a")
        engine.target.commits("a", 1, 2)
        engine.target.commits("a", 3)
        assert not engine.target.lose()
        waiting = Stream(engine.client, request("b"))
        assert (await engine.draft.next(Generate)).request_id == "a"
        assert (await engine.draft.next(Generate)).request_id == "b"
        assert engine.client.status().workers["target"] is WorkerState.STARTING
        engine.target.be_ready()
        assert await engine.target.next(Generate) == Generate(request_id="a", has_committed=True)
        assert engine.target.asked[-1].committed == (1, 2, 3)
        engine.target.accepts("a")
        assert [each.request_id for each in engine.target.of(Generate)[2:]] == [], "b came while a was on trial"
        engine.target.commits("a", 4)
        engine.target.ends("a")
        assert await stream.ended() == [1, 2, 3, 4]
        late = await engine.target.next(Generate)
        assert late == Generate(request_id="b")
        engine.target.accepts("b")
        engine.target.ends("b")
        await waiting.ended()
        assert engine.registry.get_sample_value("vidspec:worker_restarts_total", {"role": "target"}) == 1


async def test_outages_add_up_and_each_lasts_until_there_is_a_target_again(engine_of: Start) -> None:
    async with engine_of() as engine:
        totals = [engine.client.status().outage_s]
        for _ in range(2):
            engine.target.lose()
            engine.draft.lose()
            engine.draft.be_ready()
            assert engine.client.status().outage_s < engine.client.status().outage_s
            engine.target.be_ready()
            totals.append(engine.client.status().outage_s)
            assert engine.client.status().outage_s == totals[-1]
        assert 0 == totals[0] < totals[1] < totals[2]


async def test_both_workers_get_the_ends_of_a_new_channel_whenever_one_of_them_is_new(engine_of: Start) -> None:
    async with engine_of() as engine:
        for lost in (None, "target", "draft"):
            if lost is not None:
                engine.worker(lost).lose()
                engine.worker(lost).be_ready()
            workers = engine.target, engine.draft
            for worker in workers:
                await worker.next(Peer)
            ends = [Channel.from_fd(fd) for worker in workers for fd in worker.last_fds]
            ends[0].send(Follow(request_id="x"))
            received = ends[1].receive()
            assert received is not None
            assert received[0] == Follow(request_id="x")
            for end in ends:
                end.close()


async def test_what_ends_two_targets_is_refused_everywhere_and_the_rest_is_answered(engine_of: Start) -> None:
    async with engine_of() as engine:
        guilty, innocent = await engine.begin("guilty"), await engine.begin("innocent")
        engine.target.commits("innocent", 1)
        assert not engine.target.lose()
        engine.target.be_ready()
        assert (await engine.target.next(Generate)).request_id == "guilty"
        assert engine.target.lose(), "it was not the worker's fault"
        with pytest.raises(GenerationFailed, match="ends the model's process"):
            await guilty.ended()
        assert (await engine.draft.next(Cancel)).request_id == "guilty"
        engine.target.be_ready()
        assert await engine.target.next(Generate) == Generate(request_id="innocent", has_committed=True)
        assert engine.target.asked[-1].committed == (1,)
        engine.target.commits("innocent", *range(2, 2 + CLEARED_AFTER))
        engine.target.ends("innocent")
        assert await innocent.ended() == list(range(1, 2 + CLEARED_AFTER))


async def test_a_lost_draft_is_given_what_is_in_flight_when_it_is_back_but_not_a_third_time(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream, alone = await engine.begin("a"), await engine.begin("b", speculation=OFF)
        for num_given in (1, 2, 2):
            assert [each.request_id for each in engine.draft.of(Generate)] == ["a"] * num_given
            assert not engine.draft.lose()
            engine.target.commits("a", 1)
            engine.draft.be_ready()
        for each, name in ((stream, "a"), (alone, "b")):
            engine.target.ends(name)
            await each.ended()
        assert stream.ids == [1, 1, 1]


async def test_a_request_that_comes_while_a_worker_is_away_is_given_to_it_when_it_is_back(engine_of: Start) -> None:
    async with engine_of() as engine:
        engine.target.lose()
        engine.draft.lose()
        stream = Stream(engine.client, request("a"))
        async with asyncio.timeout(10):
            while not engine.client.status().num_waiting:  # noqa: ASYNC110  its payload is still being written
                await asyncio.sleep(0.001)
        assert not engine.target.of(Generate) + engine.draft.of(Generate)
        engine.target.be_ready()
        assert (await engine.target.next(Generate)).request_id == "a"
        engine.draft.be_ready()
        assert (await engine.draft.next(Generate)).request_id == "a"
        engine.target.accepts("a")
        engine.target.ends("a")
        await stream.ended()


async def test_a_request_that_a_target_had_no_room_for_is_given_to_it_after_its_next_sign_of_life(
    engine_of: Start,
) -> None:
    async with engine_of() as engine:
        engine.target.is_full = True
        stream = Stream(engine.client, request("a"))
        assert (await engine.draft.next(Generate)).request_id == "a"
        engine.target.is_full = False
        engine.target.say(Heartbeat(cache_usage=0.0, busy_s=0.0, elapsed_s=1.0, until=0.0, forwards=()))
        assert (await engine.target.next(Generate)).request_id == "a"
        engine.target.accepts("a")
        engine.target.ends("a")
        await stream.ended()


async def test_a_target_given_up_fails_every_answer_and_refuses_the_next(engine_of: Start) -> None:
    async with engine_of() as engine:
        streams = [await engine.begin(name) for name in ("a", "b")]
        engine.target.commits("a", 1)
        engine.target.die("five times in a row")
        for stream in (*streams, Stream(engine.client, request("c"))):
            with pytest.raises(EngineDead):
                await stream.ended()
        assert streams[0].ids == [1]


async def test_a_request_on_its_way_when_the_target_is_given_up_is_refused(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = Stream(engine.client, request("a"))
        await asyncio.sleep(0)  # now a thread writes its payload
        engine.target.die("five times in a row")
        with pytest.raises(EngineDead):
            await stream.ended()


async def test_a_draft_given_up_costs_no_answer(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = await engine.begin("a")
        engine.draft.lose()
        engine.draft.die("five times in a row")
        engine.target.commits("a", 1)
        engine.target.ends("a")
        assert await stream.ended() == [1]


async def test_a_client_that_leaves_is_cancelled_on_both_workers_once(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = await engine.begin("a")
        engine.target.commits("a", 1)
        await stream.leave()
        engine.target.commits("a", 2)
        for worker in (engine.target, engine.draft):
            assert worker.of(Cancel) == [Cancel(request_id="a")]
        again = await engine.begin("a")  # the id is free again
        engine.target.ends("a")
        assert await again.ended() == []


async def test_a_stop_string_ends_the_answer_and_cancels_the_rest(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = await engine.begin("a", stop=("w3",))
        engine.target.commits("a", 1, 2, 3, 4, 5)
        assert await stream.ended() == [1, 2, 3]
        assert "".join(event.text for event in stream.events if isinstance(event, TextDelta)).split() == ["w1", "w2"]
        assert stream.finished.finish_reason is FinishReason.STOP
        for worker in (engine.target, engine.draft):
            assert worker.of(Cancel) == [Cancel(request_id="a")]


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (RejectReason.TOO_LONG, ContextLengthExceeded),
        (RejectReason.INVALID, InvalidRequest),
        (RejectReason.FAILED, GenerationFailed),
    ],
)
async def test_a_refusal_reaches_its_caller_and_the_draft(
    engine_of: Start, reason: RejectReason, error: type[ServiceError]
) -> None:
    async with engine_of() as engine:
        stream = Stream(engine.client, request("a"))
        await engine.target.next(Generate)
        engine.target.say(Rejected(request_id="a", reason=reason, message="why"))
        with pytest.raises(error, match="why"):
            await stream.ended()
        assert engine.draft.of(Cancel) == [Cancel(request_id="a")]
        assert not engine.target.of(Cancel)


async def test_no_payload_outlives_its_request(engine_of: Start) -> None:
    async with engine_of() as engine:
        num_open = len(os.listdir("/proc/self/fd"))
        for name in ("ended", "left", "refused"):
            stream = await engine.begin(name)
            assert len(os.listdir("/proc/self/fd")) == num_open + 1
            if name == "left":
                await stream.leave()
            elif name == "ended":
                engine.target.ends(name)
                await stream.ended()
            else:
                engine.target.say(Rejected(request_id=name, message=""))
                await asyncio.gather(stream.task, return_exceptions=True)
            assert len(os.listdir("/proc/self/fd")) == num_open


async def test_acceptance_is_counted_and_reported(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = await engine.begin("a")
        engine.target.commits("a", 1)
        engine.target.commits("a", 2, 3, 4, num_judged=3, num_accepted=2)
        engine.target.commits("a", 5, num_judged=1, num_accepted=0, num_rollbacks=2)
        engine.target.ends("a")
        await stream.ended()
        found = stream.finished.speculation
        assert (found.num_verifications, found.num_drafts) == (2, 2)
        assert (found.num_draft_tokens, found.num_accepted_tokens, found.acceptance_rate) == (4, 2, 0.5)
        assert found.mode is PARALLEL, "auto is what was chosen by, not what was done"
        for name, value in (("num_drafts", 2), ("num_draft_tokens", 4), ("num_accepted_tokens", 2), ("rollbacks", 2)):
            assert engine.registry.get_sample_value(f"vidspec:spec_decode_{name}_total") == value
        per_place = "vidspec:spec_decode_num_accepted_tokens_per_pos_total"
        assert [engine.registry.get_sample_value(per_place, {"position": place}) for place in "012"] == [1, 1, None]


async def test_tokens_that_have_come_together_are_told_in_one_event(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = await engine.begin("a")
        engine.target.commits("a", 1, 2)
        engine.target.commits("a", 3, num_judged=1, num_accepted=0)
        engine.target.commits("a", 4)
        engine.target.ends("a")
        assert await stream.ended() == [1, 2, 3, 4]
        (told,) = [event for event in stream.events if isinstance(event, TextDelta)]
        assert (told.text.split(), told.num_tokens) == (["w1", "w2", "w3", "w4"], 4)
        assert stream.finished.speculation.num_verifications == 2


async def test_what_came_before_a_failure_is_told_before_it(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = await engine.begin("a")
        engine.target.commits("a", 1, 2)
        engine.target.say(Rejected(request_id="a", message="why"))
        with pytest.raises(GenerationFailed, match="why"):
            await stream.ended()
        assert stream.ids == [1, 2]


async def test_shutting_down_fails_what_is_in_flight(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = await engine.begin("a")
        await engine.client.close()
        assert engine.target.state is engine.draft.state is WorkerState.DEAD
        with pytest.raises(EngineDead, match="shutting down"):
            await stream.ended()


@pytest.mark.parametrize("words", [["w1"], ["w1", "w2", "w3"]])
async def test_a_text_has_all_of_its_tokens_and_no_others_whatever_lengths_a_training_left_in_the_file(
    words: list[str], engine_of: Start
) -> None:
    """Bad words of too many tokens would be allowed, and /tokenize would count wrong."""
    async with engine_of() as engine:
        assert engine.client.tokenizer.encode(words, is_pretokenized=True).tokens == words


async def test_workers_that_speak_other_tokens_do_not_start(engine_of: Start) -> None:
    FakeWorker.vocabulary["draft"] = [*WORDS[:-1], "other"]
    with pytest.raises(ConfigError, match="do not share a tokenizer"):
        async with engine_of():
            pass


async def test_workers_that_are_not_ready_in_time_do_not_start(
    engine_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWorker, "starts", False)
    with pytest.raises(ConfigError, match=r"not ready within 0\.01 s; .*--start-timeout-s"):
        async with engine_of(replace(PAIR, start_timeout_s=0.01)):
            pass


async def test_a_worker_that_is_lost_holds_no_cache_and_does_nothing(engine_of: Start) -> None:
    async with engine_of() as engine:
        beat = Heartbeat(cache_usage=0.97, busy_s=0.9, elapsed_s=1.0, until=time.monotonic(), forwards=())
        engine.draft.say(beat)

        def told() -> list[float | None]:
            names = ("vidspec:kv_cache_usage_perc", "vidspec:worker_idle_ratio")
            return [engine.registry.get_sample_value(name, {"role": "draft"}) for name in names]

        assert told() == [0.97, pytest.approx(0.1)]
        engine.draft.lose()
        assert told() == [0, 1]


async def test_workers_that_have_lost_each_other_are_connected_again(engine_of: Start) -> None:
    async with engine_of() as engine:
        for worker, other in ((engine.target, engine.draft), (engine.draft, engine.target)):
            assert (await worker.next(Peer)).pid == other.pid
        for role in ("target", "draft"):
            beat = Heartbeat(
                cache_usage=0.0, busy_s=0.0, elapsed_s=1.0, until=time.monotonic(), forwards=(), has_peer=False
            )
            engine.worker(role).say(beat)
            engine.worker(role).say(beat)  # sent before the worker can have read the first Peer
            for worker in (engine.target, engine.draft):
                await worker.next(Peer)
                assert not [message for message in worker.of(Peer) if message is not worker.heard[-1]][2:]
                for fd in worker.last_fds:
                    os.close(fd)


@pytest.mark.parametrize(
    ("target", "draft", "shares"),
    [
        ({"tower": "a"}, {"tower": "a"}, (True, False)),
        ({"tower": "a", "device": "cuda:0"}, {"tower": "b", "device": "cuda:0"}, (False, True)),
        ({"device": "cuda:0"}, {"device": "cuda:1"}, (False, False)),
    ],
)
async def test_workers_are_told_what_they_share(
    engine_of: Start,
    monkeypatch: pytest.MonkeyPatch,
    target: dict[str, str],
    draft: dict[str, str],
    shares: tuple[bool, bool],
) -> None:
    monkeypatch.setattr(FakeWorker, "facts", {"target": target, "draft": draft})
    async with engine_of() as engine:
        for worker in (engine.target, engine.draft):
            peer = await worker.next(Peer)
            assert (peer.shares_tower, peer.shares_gpu) == shares
            for fd in worker.last_fds:
                os.close(fd)


async def test_an_answer_can_be_taken_up_where_another_engine_left_it(engine_of: Start) -> None:
    async with engine_of() as engine:
        stream = Stream(engine.client, request("a", committed=(1, 2)))
        assert (await engine.target.next(Generate)) == Generate(request_id="a")
        assert engine.target.asked[-1].committed == (1, 2)
        engine.target.accepts("a")
        engine.target.commits("a", 3)
        engine.target.lose()
        engine.target.be_ready()
        await engine.target.next(Generate)
        assert engine.target.asked[-1].committed == (1, 2, 3)
        engine.target.commits("a", 4)
        engine.target.ends("a")
        assert await stream.ended() == [3, 4]
        assert "".join(event.text for event in stream.events if isinstance(event, TextDelta)).split() == ["w3", "w4"]
        assert stream.finished.completion_tokens == 2
