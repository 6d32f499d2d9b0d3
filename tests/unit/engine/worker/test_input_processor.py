"""A prompt that cannot be prepared is refused alone: the worker that met it goes on with the next one."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from typing import cast

import pytest
import torch

from tests.unit.engine.requests import request_of
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.errors import ContextOverflow
from vidspec_models.inputs import Prompt
from vidspec_models.request import Turn, Video
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.ipc.channel import wait_readable
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
