"""The side stream without a GPU: on a CPU it is nothing, on CUDA every tensor of a prompt is named to the allocator."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vidspec_models.cuda_stream import SideStream
from vidspec_models.inputs import Prompt

PROMPT = Prompt(
    ids=(1, 2),
    embeddings=torch.zeros(2, 4),
    rotary=(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)),
    is_video=torch.tensor([True, False]),
    next_position=2,
)


class Noted:
    """A tensor that tells which streams it was used on."""

    def __init__(self) -> None:
        self.streams: list[object] = []
        self.record_stream = self.streams.append


def test_on_a_cpu_a_prompt_passes_through() -> None:
    side = SideStream(torch.device("cpu"))
    with side.use():
        pass
    assert side.hand_over(PROMPT) is PROMPT


@pytest.mark.parametrize("has_all", [True, False])
def test_all_that_a_prompt_is_made_of_is_kept_from_the_side_streams_next_work(
    monkeypatch: pytest.MonkeyPatch, *, has_all: bool
) -> None:
    decoding = object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: decoding if device == "cuda:1" else None)
    side: Any = SideStream(torch.device("cpu"))
    side._stream = SimpleNamespace(device="cuda:1")
    tensors: list[Any] = [Noted() for _ in range(6)]
    embeddings, cos, sin, is_video, grid, additions = tensors
    prompt = replace(PROMPT, embeddings=embeddings, rotary=(cos, sin), is_video=is_video)
    if has_all:
        prompt = replace(prompt, grid=grid, layer_additions=additions)
    side.hand_over(prompt)
    assert [tensor.streams for tensor in tensors] == [[decoding]] * 4 + [[decoding] if has_all else []] * 2
