"""Only a prompt that cannot be prepared is refused: its worker continues with the next one."""

from __future__ import annotations

import gc
import os
import select
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.unit.engine.counting_model import configure
from tests.unit.engine.requests import request_of
from vidspec_models.compression import DyCoke
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.errors import Cancelled, ContextOverflow, ConversationRefused
from vidspec_models.prompt import Prompt, PromptIdentity
from vidspec_models.request import Compression, Reasoning, TowerOutput, Turn, Video
from vidspec_models.video_lm import VideoHandling, VideoLM
from vidspec_service.engine.ipc.channel import wait_readable
from vidspec_service.engine.ipc.payload import TowerMemory
from vidspec_service.engine.worker.input_processor import InputProcessor, QueuedRequest

pytestmark = pytest.mark.unit


class Thoughtless:
    """A model whose answers have no reasoning."""

    def reasoning_after(self, *_: object) -> Reasoning:
        return Reasoning.NONE


class Picky(Thoughtless):
    """A model that fails as its own code, or a library below it, may fail."""

    def prepare(self, turns: Sequence[Turn], videos: Sequence[Video], encoded: EncoderCache, *_: object) -> Prompt:
        text = turns[-1].text
        if text == "poison":
            raise RuntimeError("the size of tensor a must match the size of tensor b")
        if text == "long":
            raise ContextOverflow("too long")
        if text == "refused":
            try:
                raise RuntimeError("roles must alternate")
            except RuntimeError as error:
                raise ConversationRefused("the template refuses it") from error
        nothing = torch.zeros(0)
        return Prompt(ids=(1, 2), embeddings=nothing, rotary=(nothing, nothing), is_video=nothing, next_position=2)


def input_processor(model: object, role: str = "target", *, merge_ratio: float = 0.5) -> InputProcessor:
    return InputProcessor(cast("VideoLM", model), configure(role, dycoke=DyCoke(merge_ratio=merge_ratio)), 1000)


def processed(processor: InputProcessor, texts: Sequence[str], num_before: int = 0) -> list[QueuedRequest]:
    """These requests, after `num_before` that were submitted before."""
    for text in texts:
        processor.submit(QueuedRequest(request_of(text)))
    found: list[QueuedRequest] = []
    while len(found) < num_before + len(texts):
        wait_readable([processor], 20)
        done = processor.take_finished()
        assert done, "a prompt was lost"
        found += done
    return found


def test_whatever_preparing_raises_is_this_requests_and_those_after_it_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    processor = input_processor(Picky())
    poison, long, good = processed(processor, ["poison", "long", "good"])
    assert type(poison.prompt) is ValueError
    assert "tensor" not in str(poison.prompt)  # a client must not see internals
    (logged,) = caplog.records
    assert "poison" in logged.getMessage()
    assert logged.exc_info is not None, "but the operator does"
    assert isinstance(long.prompt, ContextOverflow)
    assert isinstance(good.prompt, Prompt)
    assert [item.request_id for item in (poison, long, good)] == ["poison", "long", "good"]


@pytest.mark.parametrize(("text", "error"), [("long", ContextOverflow), ("refused", ConversationRefused)])
def test_a_refused_request_lets_go_of_its_frames_without_the_collector(text: str, error: type[Exception]) -> None:
    """An error that another one caused has two tracebacks."""
    frames = np.zeros((2, 2, 2, 3), np.uint8)
    held = weakref.ref(frames)
    processor = input_processor(Picky())
    gc.disable()
    try:
        processor.submit(QueuedRequest(replace(request_of(text), videos=(replace(VIDEO, frames=frames),))))
        del frames
        refused, _ = processed(processor, ["good"], num_before=1)
        assert isinstance(refused.prompt, error)
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_prompts_are_prepared_on_any_core_even_if_the_loop_is_kept_off_one() -> None:
    class Noting(Picky):
        def prepare(self, *given: Any) -> Prompt:
            self.cores = os.sched_getaffinity(0)
            return super().prepare(*given)

    model, cores = Noting(), os.sched_getaffinity(0)
    processor = input_processor(model, "draft")
    try:
        os.sched_setaffinity(0, {min(cores)})
        processed(processor, ["good"])
    finally:
        os.sched_setaffinity(0, cores)
    assert model.cores == cores


def test_a_prompt_looked_for_just_before_it_wakes_the_loop_is_found_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = input_processor(Picky())
    early: list[list[QueuedRequest]] = []
    wake = os.eventfd_write

    def look_then_wake(descriptor: int, value: int) -> None:
        early.append(processor.take_finished())
        wake(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", look_then_wake)
    (first,) = processed(processor, ["first"])
    (second,) = processed(processor, ["second"])
    assert [item.request_id for item in (first, second)] == ["first", "second"]
    assert early == [[], []]
    readable, _, _ = select.select([processor], [], [], 0)
    assert readable == []  # otherwise the loop would spin until the next prompt


VIDEO = Video(
    frames=np.zeros((2, 2, 2, 3), np.uint8),
    source_indices=(0, 1),
    source_fps=1.0,
    source_num_frames=2,
    duration_s=2.0,
    key="k",
)


class Keys(Thoughtless):
    """Records a video's cache key and its token selection; `has_room` says whether videos fit into the context."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.seen: list[tuple[str | None, str | None, float | None]] = []
        self._has_room = has_room

    def has_room_for(self, videos: Sequence[Video], num_others: int) -> bool:
        assert num_others == len("good") + 8
        return self._has_room

    def prepare(self, turns: object, videos: Sequence[Video], _: object, __: object, handling: VideoHandling) -> Prompt:
        assert not handling.is_cancelled()
        self.room, selector = handling.context_length, handling.selector
        chosen = (None, None) if selector is None else (selector.method, selector.ratio)
        self.seen.append((videos[0].key, *chosen))
        prompt = Picky().prepare([Turn(role="user", parts=("good",))], (), EncoderCache(0))
        return replace(prompt, identity=PromptIdentity(video_keys=("k",), rows=np.arange(2)))


def prepared(processor: InputProcessor, item: QueuedRequest) -> Prompt:
    processor.submit(item)
    wait_readable([processor], 20)
    (done,) = processor.take_finished()
    assert isinstance(done.prompt, Prompt), done.prompt
    return done.prompt


@pytest.mark.parametrize(
    ("compression", "of_draft", "of_target"),
    [
        (Compression.EARLYTOM, (None, None, None), ("k", "earlytom", 0.25)),
        (Compression.VIDCOM2, ("k", None, None), ("k", "vidcom2", 0.25)),
        (Compression.DYCOKE, ("k", None, None), ("k", "dycoke", 0.85)),
    ],
)
def test_the_target_chooses_from_a_video_that_the_draft_sees_whole_and_keeps_no_merged_rows_of(
    compression: Compression, of_draft: tuple[object, ...], of_target: tuple[object, ...]
) -> None:
    rows = TowerOutput(placeholder_text="<video>", rows=np.zeros((1, 1, 1), np.float32))
    asked = replace(request_of("good"), videos=(VIDEO,), compression=compression, max_tokens=8)
    for role, tower, expected in (("draft", TowerMemory.of((rows,)), of_draft), ("target", None, of_target)):
        model = Keys()
        processor = input_processor(model, role, merge_ratio=0.2)
        prepared(processor, QueuedRequest(asked, tower=tower))
        assert model.seen == [expected]


def test_a_draft_without_room_for_the_whole_chooses_as_the_target_does() -> None:
    asked = replace(request_of("good"), videos=(VIDEO,), max_tokens=8)
    asked = replace(asked, compression=Compression.V_CAST, compression_ratio=0.1)
    model = Keys(has_room=False)
    prepared(input_processor(model, "draft"), QueuedRequest(asked))
    assert model.seen == [("k", "v-cast", 0.1)]


def test_videos_must_leave_room_in_the_targets_cache_but_not_in_a_drafts_which_keeps_only_a_part_of_them() -> None:
    asked = replace(request_of("good"), videos=(VIDEO,))
    for role, room in (("target", 1000), ("draft", None)):
        model = Keys()
        prepared(input_processor(model, role), QueuedRequest(asked))
        assert model.room == room


def test_waiting_and_preparing_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(Picky):
        now = 100.0

        def monotonic(self) -> float:
            return self.now

        def prepare(self, *given: Any) -> Prompt:
            self.now += 5.0
            return super().prepare(*given)

    clock = Clock()
    monkeypatch.setattr("vidspec_service.engine.worker.input_processor.time", clock)
    item = QueuedRequest(request_of("good"), arrived=93.0)
    prepared(input_processor(clock), item)
    assert (item.queue_s, item.prepare_s) == (7.0, 5.0)


def test_of_frames_that_the_targets_tower_has_merged_a_draft_chooses_nothing_though_it_has_little_room() -> None:
    rows = TowerOutput(placeholder_text="<video>", rows=np.zeros((1, 1, 1), np.float32))
    asked = replace(request_of("good"), videos=(VIDEO,), compression=Compression.EARLYTOM, max_tokens=8)
    model = Keys(has_room=False)
    prepared(input_processor(model, "draft"), QueuedRequest(asked, tower=TowerMemory.of((rows,))))
    assert model.seen == [(None, None, None)]


@pytest.mark.parametrize("compression", Compression)
def test_a_cache_whose_rows_are_hidden_while_it_decodes_serves_nobody_else(compression: Compression) -> None:
    asked = replace(request_of("good"), videos=(VIDEO,), compression=compression)
    prompt = prepared(input_processor(Keys()), QueuedRequest(asked))
    assert (prompt.identity is None) is (compression is Compression.DYCOKE)


class Slow(Thoughtless):
    """Encodes a long video part by part, for as long as the result is wanted."""

    def __init__(self) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.num_asked = 0

    def prepare(self, *given: Any) -> Prompt:
        self.num_asked += 1
        self.began.set()
        assert self.goes_on.wait(20)
        if given[-1].is_cancelled():
            raise Cancelled("nobody waits for this video any more")
        return Picky().prepare([Turn(role="user", parts=("good",))], (), EncoderCache(0))


def test_a_request_that_is_cancelled_is_worked_on_no_longer_and_others_are() -> None:
    model = Slow()
    processor = input_processor(model)
    for name in ("left", "left in the queue", "stays"):
        processor.submit(QueuedRequest(request_of(name)))
    assert model.began.wait(20)
    processor.cancel("left")
    processor.cancel("left in the queue")
    processor.cancel("never heard of")
    model.goes_on.set()
    found: list[QueuedRequest] = []
    while len(found) < 3:
        wait_readable([processor], 20)
        found += processor.take_finished()
    assert [type(item.prompt) for item in found] == [Cancelled, Cancelled, Prompt]
    assert model.num_asked == 2, "what is cancelled in the queue is not begun"
