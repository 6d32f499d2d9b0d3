"""A prompt that cannot be prepared is refused alone: the worker that met it goes on with the next one."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import cast

import pytest
import torch

from vidspec_models.encoded_videos import EncodedVideos
from vidspec_models.errors import ContextOverflow
from vidspec_models.inputs import Prompt, Turn, Video
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.channels import wait_readable
from vidspec_service.engine.messages import Generate
from vidspec_service.engine.payload import write_payload
from vidspec_service.engine.preparing import Prepared, Preparer, Waiting
from vidspec_service.engine.types import ChatMessage

pytestmark = pytest.mark.unit


class Picky:
    """A model that fails in the ways that its own code, or a library below it, may fail."""

    def prepare(self, turns: Sequence[Turn], videos: Sequence[Video], encoded: EncodedVideos) -> Prompt:
        text = turns[-1].text
        if text == "poison":
            raise RuntimeError("the size of tensor a must match the size of tensor b")
        if text == "long":
            raise ContextOverflow("too long")
        nothing = torch.zeros(0)
        return Prompt(ids=(1, 2), embeddings=nothing, rotary=(nothing, nothing), is_video=nothing, next_position=2)


def prepared(preparer: Preparer, texts: Sequence[str]) -> list[Prepared]:
    for text in texts:
        request = Generate(
            request_id=text, max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, seed=0, speculation="off",
            compression="none",
        )  # fmt: skip
        payload = write_payload((ChatMessage(role="user", text=text),), ())
        preparer.submit(Waiting(request, payload, time.monotonic()))
    found: list[Prepared] = []
    while len(found) < len(texts):
        wait_readable([preparer], 20)
        done = preparer.finished()
        assert done, "a prompt was lost"
        found += done
    return found


def test_whatever_preparing_raises_is_this_requests_and_those_after_it_are_served() -> None:
    preparer = Preparer(cast("VideoLM", Picky()), encoded_bytes=0)
    poison, long, good = prepared(preparer, ["poison", "long", "good"])
    assert type(poison.result) is ValueError
    assert "tensor" not in str(poison.result)  # a client is not told what is inside
    assert isinstance(long.result, ContextOverflow)
    assert isinstance(good.result, Prompt)
    assert [item.waiting.request.request_id for item in (poison, long, good)] == ["poison", "long", "good"]


def test_a_prompt_looked_for_just_before_it_wakes_the_loop_is_found_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preparer = Preparer(cast("VideoLM", Picky()), encoded_bytes=0)
    early: list[list[Prepared]] = []
    wake = os.eventfd_write

    def look_then_wake(descriptor: int, value: int) -> None:
        early.append(preparer.finished())
        wake(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", look_then_wake)
    (first,) = prepared(preparer, ["first"])
    (second,) = prepared(preparer, ["second"])
    assert [item.waiting.request.request_id for item in (first, second)] == ["first", "second"]
    assert early == [[], []]
    readable, _, _ = select.select([preparer], [], [], 0)
    assert readable == []  # else the loop would spin until the next prompt
