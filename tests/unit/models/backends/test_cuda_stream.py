"""The side stream, tested without a GPU: it is waited for, and the allocator knows every tensor of a prompt."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from vidspec_models.backends.cuda.stream import SideStream
from vidspec_models.prompt import Prompt

PROMPT = Prompt(
    ids=(1, 2),
    embeddings=torch.zeros(2, 4),
    rotary=(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)),
    is_video=torch.tensor([True, False]),
    next_position=2,
)


class Noted:
    """A tensor that records the streams it was used on."""

    def __init__(self) -> None:
        self.streams: list[object] = []
        self.record_stream = self.streams.append


class FakeStream:
    """Records waits; torch's own stream needs CUDA."""

    def __init__(self, device: object) -> None:
        self.device = device
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("has_all", [True, False])
def test_all_that_a_prompt_is_made_of_is_kept_from_the_side_streams_next_work(
    monkeypatch: pytest.MonkeyPatch, *, has_all: bool
) -> None:
    decoding, current = object(), list[object]()

    def using(stream: object) -> AbstractContextManager[None]:
        current.append(stream)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: decoding if device == "cuda:1" else None)
    tensors: list[Any] = [Noted() for _ in range(6)]
    embeddings, cos, sin, is_video, grid, deepstack = tensors
    prompt = replace(PROMPT, embeddings=embeddings, rotary=(cos, sin), is_video=is_video, grid=grid)
    if has_all:
        prompt = replace(prompt, deepstack=deepstack)
    side: Any = SideStream(cast("torch.device", "cuda:1"))
    assert side.run(lambda: prompt) is prompt
    assert current == [side._stream]
    assert side._stream.num_waits == 1
    assert [tensor.streams for tensor in tensors] == [[decoding]] * 5 + [[decoding] if has_all else []]
