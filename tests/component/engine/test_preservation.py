"""What the draft sees affects speed, never text: under every strategy, and however the attention scores arrive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, ask, lasting, scene_video, unsure_video
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import GenerationRequest, Preservation, SamplingParams, SpeculationMode
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.draft.loop import DraftLoop
from vidspec_service.engine.frontend.workers import configure_messages
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, wait_readable
from vidspec_service.engine.ipc.messages import Ended, Generate, Message, Peer, Proposal, Relevance, Tokens
from vidspec_service.engine.ipc.payload import CellScores, close_fds, read_scores, write_request, write_scores
from vidspec_service.engine.speculation.probe import measure_costs
from vidspec_service.engine.target.loop import TargetLoop

CELLS = 8 * 64
KEPT = CELLS // 10 + 1  # and the newline
ANSWER = 120  # enough tokens for the draft to take part, however fast the target is
LAW = SamplingParams(temperature=0.7, seed=11)


def test_the_answer_says_how_much_the_draft_saw(engine: EngineHarness) -> None:
    for frames, seen in ((unsure_video(1), KEPT), (unsure_video(2, num_frames=1), 16 + 1)):
        request = ask(f"seen-{seen}", "Describe the video.", [frames], speculation=SpeculationMode.PARALLEL)
        assert engine.answer(lasting(request)).finished.speculation.draft_video_tokens == seen
    alone = ask("alone", "Describe the video.", [unsure_video(1)], speculation=SpeculationMode.OFF)
    assert engine.answer(alone).finished.speculation.draft_video_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", Preservation)
def test_every_mode_gives_the_targets_own_ids_under_every_strategy(
    engine: EngineHarness, strategy: Preservation
) -> None:
    requests = [
        ask(f"{seed}", "Describe the video.", [scene_video(seed)], sampling=LAW, max_tokens=60) for seed in range(4)
    ]
    expected = [engine.answer(replace(each, speculation=SpeculationMode.OFF)).ids for each in requests]
    seen = {Preservation.NONE: CELLS + 1, Preservation.BLIND: 1}.get(strategy, KEPT)
    harness = EngineHarness(replace(PAIR, preservation=strategy))
    try:
        for mode in (SpeculationMode.SERIAL, SpeculationMode.PARALLEL):
            answers = harness.answers([replace(each, speculation=mode) for each in requests])
            assert [answer.ids for answer in answers] == expected
            found = {answer.finished.speculation.draft_video_tokens for answer in answers}
            assert found - {0} == {seen}, "0: an answer that was complete before the draft had read its prompt"
    finally:
        harness.close()


@pytest.fixture(scope="module")
def models() -> dict[str, VideoLM]:
    return {
        role: load_model(ModelSpec(path="bundled", role=role, device="cpu", dtype="float32"))
        for role in ("target", "draft")
    }


Tap = Callable[[Relevance, int], list[tuple[Relevance, int]]]  # returns what the draft gets now


TAPS = ("at once", "never", "after the end", "of another grid", "of another size")


class TappedPair:
    """Both loops in threads, and a thread between them that sees every message and can hold back relevance."""

    def __init__(self, models: dict[str, VideoLM], config: EngineConfig, tap: Tap) -> None:
        self._tap = tap
        self.relevances: list[CellScores] = []
        self.proposals: list[Proposal] = []
        msgspec.msgpack.Decoder(GenerationRequest)  # msgspec crashes if two threads do this first at once
        self._threads: list[threading.Thread] = []
        self.apis: dict[str, Channel] = {}
        self._ends: dict[str, Channel] = {}
        for configure in configure_messages(replace(config, kv_cache_tokens=65536)):
            self._start(configure.role, models, configure)
        self._run(self._forward)

    def _start(self, role: str, models: dict[str, VideoLM], configure: object) -> None:
        api, theirs = Channel.pair()
        self.apis[role] = api
        self._ends[role], far = Channel.pair()
        api.send(Peer(), (far.fileno(),))
        far.close()
        model, config = models[role], configure
        loop = (
            TargetLoop(model, theirs, config, measure_costs(model))  # type: ignore[arg-type]
            if role == "target"
            else DraftLoop(model, theirs, config)  # type: ignore[arg-type]
        )
        self._run(loop.run)

    def _run(self, work: Callable[[], None]) -> None:
        def until_closed() -> None:
            with suppress(ChannelClosed, ValueError):  # closed by the loop, or by the test between two polls
                work()

        thread = threading.Thread(target=until_closed, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _forward(self) -> None:
        target, draft = self._ends["target"], self._ends["draft"]
        while True:
            wait_readable([target, draft], 10)
            while (received := target.receive()) is not None:
                self._to_draft(*received)
            while (received := draft.receive()) is not None:
                assert isinstance(received[0], Proposal)
                self.proposals.append(received[0])
                target.send(received[0])

    def _to_draft(self, message: Message, fds: list[int]) -> None:
        if not isinstance(message, Relevance):
            self._ends["draft"].send(message)
            return
        self.relevances.append(read_scores(message, os.dup(fds[0])))
        for held, fd in self._tap(message, fds[0]):
            self._ends["draft"].send(held, (fd,))
            os.close(fd)

    def answer(self, name: str, seed: int, mode: SpeculationMode) -> tuple[int, ...]:
        law = SamplingParams(temperature=0.7, seed=11)
        clip = scene_video(seed)
        request = ask(name, "Describe the video.", [clip], max_tokens=ANSWER, sampling=law, speculation=mode)
        request = replace(request, ignore_eos=True)
        generate = Generate(request_id=name)
        payload = write_request(request)
        for role in ("draft", "target") if mode is not SpeculationMode.OFF else ("target",):
            self.apis[role].send(generate, payload)
        close_fds(payload)
        ids: tuple[int, ...] = ()
        while True:
            wait_readable([self.apis["target"]], 60)
            received = self.apis["target"].receive()
            assert received is not None, "no answer in time"
            if isinstance(received[0], Tokens):
                ids += received[0].ids
            elif isinstance(received[0], Ended):
                return ids

    def close(self) -> None:
        for channel in (*self.apis.values(), *self._ends.values()):
            channel.close()
        for thread in self._threads:
            thread.join(20)


@pytest.fixture
def tapped(models: dict[str, VideoLM]) -> Iterator[Callable[[Tap], TappedPair]]:
    pairs: list[TappedPair] = []

    def start(tap: Tap) -> TappedPair:
        pairs.append(TappedPair(models, PAIR, tap))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()


def pass_on(message: Relevance, fd: int) -> list[tuple[Relevance, int]]:
    return [(message, fd)]


def drop(_: Relevance, fd: int) -> list[tuple[Relevance, int]]:
    os.close(fd)
    return []


class PassOneLate:
    """Passes each request's relevance on only when the next one's arrives, so for a request that has ended."""

    def __init__(self) -> None:
        self._held: list[tuple[Relevance, int]] = []

    def __call__(self, message: Relevance, fd: int) -> list[tuple[Relevance, int]]:
        now, self._held = self._held, [(message, fd)]
        return now


def from_another_grid(message: Relevance, fd: int) -> list[tuple[Relevance, int]]:
    return [(Relevance(request_id=message.request_id, grid_checksum=message.grid_checksum ^ 1), fd)]


def of_another_size(message: Relevance, fd: int) -> list[tuple[Relevance, int]]:
    os.close(fd)
    return [(message, write_scores(np.ones(3, np.float16)))]


@pytest.fixture(scope="module")
def undisturbed(models: dict[str, VideoLM]) -> Iterator[list[tuple[int, ...]]]:
    """The answers without speculation: nobody would read their relevance, so none is sent."""
    pair = TappedPair(models, PAIR, drop)
    yield [pair.answer(f"off-{seed}", seed, SpeculationMode.OFF) for seed in range(2)]
    assert pair.relevances == []
    pair.close()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # loops leave channels open: their process would close them
@pytest.mark.parametrize("tap", [pass_on, drop, PassOneLate(), from_another_grid, of_another_size], ids=TAPS)
def test_the_text_is_the_same_however_the_relevance_arrives(
    tapped: Callable[[Tap], TappedPair], undisturbed: list[tuple[int, ...]], tap: Tap
) -> None:
    pair = tapped(tap)
    for seed, alone in enumerate(undisturbed):
        name = f"parallel-{seed}"
        assert pair.answer(name, seed, SpeculationMode.PARALLEL) == alone
        (scores,) = [scores for scores in pair.relevances if scores.request_id == name]
        assert scores.values.shape == (CELLS,)
        assert float(scores.values.max()) == 1.0
        assert float(scores.values.min()) >= 0.0
        proposals = [proposal for proposal in pair.proposals if proposal.request_id == name]
        assert proposals, "the draft did not go on"
        assert {proposal.video_tokens for proposal in proposals} == {KEPT}
