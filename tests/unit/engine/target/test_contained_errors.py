"""An error in one request ends that request only: neither loop lets it affect the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.engine.counting_model import CELLS, CountingModel, Running, configure, submit
from tests.unit.engine.requests import request_of
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.errors import ConversationRefused
from vidspec_models.grammar import GrammarError
from vidspec_models.preservation.selection import Candidates, Strategy
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.prompt import Prompt, grid_checksum
from vidspec_models.request import Turn, Video
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.draft.loop import DraftLoop
from vidspec_service.engine.ipc.channel import Channel, wait_readable
from vidspec_service.engine.ipc.messages import (
    Declined,
    Ended,
    Follow,
    Peer,
    Proposal,
    Rejected,
    Relevance,
    Tokens,
    Verdict,
)
from vidspec_service.engine.ipc.payload import write_scores
from vidspec_service.engine.speculation.plan import CostMeter
from vidspec_service.engine.target.loop import TargetLoop
from vidspec_service.engine.types import PromptReady, RejectReason

pytestmark = pytest.mark.unit

GOOD, BAD_AT_ONCE, BAD_LATER = 0, 1, 2  # seeds that decide when the strategy fails


def picky(cells: Candidates, relevance: Tensor | None, failed: Event) -> Tensor:
    is_later = cells.seed == BAD_LATER and relevance is not None
    if is_later:
        failed.set()
    if is_later or cells.seed == BAD_AT_ONCE:
        raise IndexError("index 144 is out of bounds for dimension 0 with size 144")
    first = 0 if relevance is None else 1
    return torch.arange(first, first + cells.budget)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    yield ours, theirs
    theirs.close()


def proposals(target: Channel, number: int) -> tuple[list[Proposal], set[str]]:
    """The next proposals, and the requests that the draft declined meanwhile."""
    found, declined = list[Proposal](), set[str]()
    while len(found) < number:
        wait_readable([target], 20)
        received = target.receive()
        assert received is not None, "the draft says nothing any more"
        match received[0]:
            case Proposal() as proposal:
                found.append(proposal)
            case Declined(request_id=request_id):
                declined.add(request_id)
    return found, declined


def test_a_choice_that_fails_costs_one_request_its_draft_and_the_others_nothing(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Event()
    strategy = Strategy(name="hippo", select=partial(picky, failed=failed), relevance="all")
    monkeypatch.setitem(cast("dict[str, Strategy]", STRATEGIES), "hippo", strategy)
    api, far_api = ends
    target, far_target = Channel.pair()
    model = CountingModel()
    loop = DraftLoop(cast("VideoLM", model), far_api, configure("draft"))
    checksum = grid_checksum(model.prepare([Turn(role="user", parts=("x",))], [], EncoderCache(0)))

    with Running(loop, api) as draft:
        api.send(Peer(), (far_target.fileno(),))
        far_target.close()
        for name, seed in (("later", BAD_LATER), ("at once", BAD_AT_ONCE), ("good", GOOD)):
            submit(api, request_of(name, seed=seed, max_tokens=50))
            target.send(Follow(request_id=name))
        for name in ("later", "at once", "good"):
            target.send(Verdict(request_id=name, start=0, ids=(10,), max_lead=1))
        found, declined = proposals(target, 2)
        assert ({each.request_id for each in found}, declined) == ({"later", "good"}, {"at once"})
        for name in ("later", "good"):
            fd = write_scores(np.ones(CELLS, np.float16))
            target.send(Relevance(request_id=name, grid_checksum=checksum), (fd,))
            os.close(fd)
        assert failed.wait(20)  # the draft looks at attention scores when it has nothing to propose
        for name in ("later", "at once", "good"):
            target.send(Verdict(request_id=name, start=1, ids=(11,), max_lead=3))
        found, declined = proposals(target, 3)
        assert ({each.request_id for each in found}, declined) == ({"good"}, {"later"})
        assert [proposal.ids for proposal in found] == [(12,), (13,), (14,)]
    target.close()
    loop._target.disconnect()  # a process would do this by ending
    assert draft.error is None


class Failing(CountingModel):
    """A model that prepares one prompt wrongly, refuses two and cannot prefill another."""

    def prepare(self, turns: Sequence[Turn], videos: Sequence[Video], encoded: EncoderCache, *_: object) -> Prompt:
        if turns[-1].text == "refused":
            raise ConversationRefused("roles must alternate")
        if turns[-1].text == "unwritable":
            raise GrammarError("no token of the model matches what it requires next")
        prompt = super().prepare(turns, videos, encoded)
        return replace(prompt, next_position=cast("int", None)) if turns[-1].text == "misfit" else prompt

    def prefill(self, prompt: Prompt, cache: KVCache, num_rows: int, observer: Any = None) -> Tensor | None:
        if bytes(prompt.ids).endswith(b"poison"):
            raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")
        return super().prefill(prompt, cache, num_rows, observer)


def target_of(far_api: Channel) -> TargetLoop:
    """A loop with room for one of these prompts at a time, so that a leaked row is noticed."""
    costs = CostMeter(base_s=1e-3, row_s=1e-5, draft_s=1e-4)
    return TargetLoop(cast("VideoLM", Failing()), far_api, configure("target", kv_cache_tokens=200), costs)


def said(api: Channel, num_ends: int) -> list[PromptReady | Tokens | Ended | Rejected]:
    """The messages until `num_ends` requests have ended or were rejected."""
    found: list[PromptReady | Tokens | Ended | Rejected] = []
    while sum(isinstance(message, Ended | Rejected) for message in found) < num_ends:
        wait_readable([api], 20)
        received = api.receive()
        assert received is not None, "the target says nothing any more"
        if isinstance(received[0], PromptReady | Tokens | Ended | Rejected):
            found.append(received[0])
    return found


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("poison", RejectReason.FAILED),
        ("misfit", RejectReason.FAILED),
        ("refused", RejectReason.INVALID),
        ("unwritable", RejectReason.INVALID),
    ],
    ids=["in its prefill", "before it", "by its template", "by its grammar"],
)
def test_a_request_that_the_target_fails_on_is_refused_and_the_others_are_answered(
    ends: tuple[Channel, Channel], caplog: pytest.LogCaptureFixture, bad: str, reason: RejectReason
) -> None:
    api, far_api = ends
    with Running(target_of(far_api), api) as target:
        for name in ("first", bad, "last"):
            submit(api, request_of(name, max_tokens=4))
        messages = said(api, 3)
    assert target.error is None
    (refusal,) = [message for message in messages if isinstance(message, Rejected)]
    assert (refusal.request_id, refusal.reason) == (bad, reason)
    assert "tensor" not in refusal.message
    logged = [record.exc_info for record in caplog.records if bad in record.getMessage()]
    assert bool(logged and logged[0]) == (reason is RejectReason.FAILED), "the operator sees what was wrong, and where"
    for name in ("first", "last"):
        start = name.encode()[-1] + 1
        ids = [message.ids for message in messages if isinstance(message, Tokens) and message.request_id == name]
        assert sum(ids, ()) == tuple(range(start, start + 4))


def test_where_the_device_is_broken_the_worker_ends_instead_of_refusing_everyone(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    api, far_api = ends
    with Running(target_of(far_api), api) as target:
        monkeypatch.setattr("torch.ones", broken)
        submit(api, request_of("poison", max_tokens=4))
        target.wait()
        assert "illegal memory access" in str(target.error)
