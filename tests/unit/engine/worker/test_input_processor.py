"""A prompt that cannot be prepared is refused alone: the worker that met it goes on with the next one."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.unit.engine.requests import request_of
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.errors import ContextOverflow
from vidspec_models.inputs import Prompt
from vidspec_models.request import Compression, TowerRows, Turn, Video
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.ipc.channel import wait_readable
from vidspec_service.engine.ipc.payload import TowerMemory
from vidspec_service.engine.worker.input_processor import Input, InputProcessor

pytestmark = pytest.mark.unit


class Picky:
    """A model that fails in the ways that its own code, or a library below it, may fail."""

    def prepare(self, turns: Sequence[Turn], videos: Sequence[Video], encoded: EncoderCache, *_: object) -> Prompt:
        text = turns[-1].text
        if text == "poison":
            raise RuntimeError("the size of tensor a must match the size of tensor b")
        if text == "long":
            raise ContextOverflow("too long")
        nothing = torch.zeros(0)
        return Prompt(ids=(1, 2), embeddings=nothing, rotary=(nothing, nothing), is_video=nothing, next_position=2)


def processed(processor: InputProcessor, texts: Sequence[str]) -> list[Input]:
    for text in texts:
        processor.submit(Input(request_of(text)))
    found: list[Input] = []
    while len(found) < len(texts):
        wait_readable([processor], 20)
        done = processor.take_finished()
        assert done, "a prompt was lost"
        found += done
    return found


def test_whatever_preparing_raises_is_this_requests_and_those_after_it_are_served() -> None:
    processor = InputProcessor(cast("VideoLM", Picky()), max_cached_feature_bytes=0)
    poison, long, good = processed(processor, ["poison", "long", "good"])
    assert type(poison.prompt) is ValueError
    assert "tensor" not in str(poison.prompt)  # a client is not told what is inside
    assert isinstance(long.prompt, ContextOverflow)
    assert isinstance(good.prompt, Prompt)
    assert [item.request_id for item in (poison, long, good)] == ["poison", "long", "good"]


def test_a_prompt_looked_for_just_before_it_wakes_the_loop_is_found_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = InputProcessor(cast("VideoLM", Picky()), max_cached_feature_bytes=0)
    early: list[list[Input]] = []
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
    assert readable == []  # else the loop would spin until the next prompt


VIDEO = Video(
    frames=np.zeros((2, 2, 2, 3), np.uint8),
    source_indices=(0, 1),
    source_fps=1.0,
    source_num_frames=2,
    duration_s=2.0,
    key="k",
)


class Keys:
    """Notes under which key, and with which ratio in the tower, a video is to be looked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, float | None]] = []

    def prepare(self, turns: object, videos: Sequence[Video], _: object, __: object, ___: bool, ratio: Any) -> Prompt:
        self.seen.append((videos[0].key, ratio))
        return Picky().prepare([Turn(role="user", parts=("good",))], (), EncoderCache(0))


@pytest.mark.parametrize(
    ("compression", "of_draft", "of_target"),
    [(Compression.EARLYTOM, (None, None), ("k", 0.25)), (Compression.VIDCOM2, ("k", None), ("k", None))],
)
def test_rows_of_merged_frames_are_kept_for_nobody_by_the_draft_which_merges_none_itself(
    compression: Compression, of_draft: tuple[str | None, float | None], of_target: tuple[str | None, float | None]
) -> None:
    rows = TowerRows(words="<video>", rows=np.zeros((1, 1, 1), np.float32))
    asked = replace(request_of("good"), videos=(VIDEO,), compression=compression)
    for compress, tower, expected in (
        (None, TowerMemory.of((rows,)), of_draft),
        (lambda _, prompt: prompt, None, of_target),
    ):
        model = Keys()
        processor = InputProcessor(cast("VideoLM", model), 0, compress)
        processor.submit(Input(asked, tower=tower))
        wait_readable([processor], 20)
        (item,) = processor.take_finished()
        assert isinstance(item.prompt, Prompt), item.prompt
        assert model.seen == [expected]
