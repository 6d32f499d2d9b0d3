"""Several answers to one prompt: the first one prefills it, the others copy its rows, whatever state it is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.unit.engine.far_ends import prompt_of
from tests.unit.engine.recording_model import RecordingModel
from tests.unit.engine.target.test_loop import FOR_ONE, Seeing, Target, request, text_of
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.prompt import Prompt
from vidspec_models.request import Preservation, SamplingParams, Turn, Video
from vidspec_service.engine.ipc.messages import Cancel, Ended, Follow, Relevance

pytestmark = pytest.mark.unit

SEED = 11


class Counting(RecordingModel):
    """Counts prepared prompts by their text, and prefilled rows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_prepared: Counter[str] = Counter()
        self.num_prefilled = 0

    def prepare(self, turns: Sequence[Turn], videos: Sequence[Video], encoded: EncoderCache, *_: object) -> Prompt:
        self.num_prepared[turns[-1].text] += 1
        return super().prepare(turns, videos, encoded)

    def prefill(self, prompt: Prompt, cache: KVCache, num_rows: int, observer: Any = None) -> Tensor | None:
        self.num_prefilled += num_rows
        return super().prefill(prompt, cache, num_rows, observer)


def law(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed)


def ask(target: Target, name: str, n: int, **changes: Any) -> list[str]:
    """Returns the answers' names; none is prepared before the last was sent, however slow the machine."""
    asked = replace(request(name, **changes), n=n, sampling=law(SEED))
    target.model.gates["prepare"].shut()
    target.submit(asked)
    target.model.gates["prepare"].wait_reached()
    target.model.gates["prepare"].open()
    return [asked.choice(index).request_id for index in range(n)]


@pytest.mark.parametrize("max_tokens", [1, 24], ids=["ends at once", "goes on"])
def test_a_prompt_is_computed_once_and_each_answer_is_its_seeds(stack: ExitStack, max_tokens: int) -> None:
    model = Counting()
    target = Target(stack, model, prefill_chunk=32)
    names = ask(target, "what", 5, max_tokens=max_tokens)
    for name in names:
        target.end_of(name)
    assert [target.said_of(name) for name in names] == [
        text_of("what", max_tokens, law(SEED + index)) for index in range(5)
    ]
    assert model.num_prepared["what"] == 1
    assert model.num_prefilled == prompt_of("what").num_tokens
    assert target.loop._pool.num_used == 0  # rows that no other prompt can use are freed


def test_on_a_shared_gpu_a_draft_knows_the_attention_when_it_is_asked_to_follow_another_answer(
    stack: ExitStack,
) -> None:
    target = Target(stack, Seeing(), preservation=Preservation.HIPPO)
    draft = target.draft(shares_gpu=True)
    names = ask(target, "what", 2)
    for name in names:
        target.end_of(name)
    draft.poll()
    asked = [said for said in draft.heard if isinstance(said, Relevance | Follow)]
    kinds = [type(said).__name__ for name in names for said in asked if said.request_id == name]
    assert kinds == ["Relevance", "Follow"] * 2


def test_where_room_is_short_each_answer_still_is_its_seeds(stack: ExitStack) -> None:
    target = Target(stack, Counting(), kv_cache_tokens=FOR_ONE)
    names = ask(target, "what", 3)
    for name in names:
        target.end_of(name)
    assert [target.said_of(name) for name in names] == [text_of("what", 24, law(SEED + index)) for index in range(3)]


def test_the_others_go_on_when_the_first_is_cancelled(stack: ExitStack) -> None:
    model = Counting()
    target = Target(stack, model)
    model.gates["prefill"].shut()
    names = ask(target, "what", 3)
    model.gates["prefill"].wait_reached()
    target.api.channel.send(Cancel(request_id=names[0]))
    model.gates["prefill"].open()
    for name in names[1:]:
        target.end_of(name)
    assert [target.said_of(name) for name in names[1:]] == [text_of("what", 24, law(SEED + 1 + i)) for i in range(2)]
    assert not [ended for ended in target.api.of(Ended) if ended.request_id == names[0]]


def test_two_requests_for_several_answers_share_nothing(stack: ExitStack) -> None:
    model = Counting()
    target = Target(stack, model)
    names = ask(target, "what", 2) + ask(target, "else", 2)
    for name in names:
        target.end_of(name)
    assert [target.said_of(name) for name in names] == [
        text_of(text, 24, law(SEED + index)) for text in ("what", "else") for index in range(2)
    ]
    assert model.num_prepared == {"what": 1, "else": 1}
