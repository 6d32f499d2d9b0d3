"""The target's loop over real channels: the test plays API and draft, and can stop the model before every forward."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from threading import Event
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.engine.counting_model import CELLS, Running, configure, submit
from tests.unit.engine.far_ends import Far, connect_peer, prompt_of
from tests.unit.engine.recording_model import RecordingModel
from tests.unit.engine.requests import request_of
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.grammar import GrammarMask
from vidspec_models.prompt import Prompt
from vidspec_models.request import (
    GenerationRequest,
    Include,
    Preservation,
    SamplingParams,
    SpeculationMode,
    TowerOutput,
    Turn,
)
from vidspec_models.sampling import CoupledSampler
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.config import NGRAM, WorkerConfig
from vidspec_service.engine.ipc.channel import Channel, wait_readable
from vidspec_service.engine.ipc.messages import (
    Cancel,
    Declined,
    Ended,
    Follow,
    Heartbeat,
    Message,
    Peer,
    Proposal,
    Rejected,
    Relevance,
    Tokens,
    Verdict,
)
from vidspec_service.engine.ipc.payload import TowerMemory
from vidspec_service.engine.speculation.plan import CostMeter, Plan, SpeculationState, StepCosts
from vidspec_service.engine.target.loop import TargetLoop
from vidspec_service.engine.types import PromptReady, RejectReason

FOR_ONE = 200  # rows of cache: room for one of these prompts and its answer
FOR_TWO_FOR_A_WHILE = 320


def request(name: str, *, max_tokens: int = 24, **changes: Any) -> GenerationRequest:
    return replace(request_of(name, SpeculationMode.PARALLEL, max_tokens=max_tokens), **changes)


def text_of(name: str, num_tokens: int, law: SamplingParams | None = None) -> list[int]:
    return RecordingModel().answer(prompt_of(name), num_tokens, None if law is None else CoupledSampler(law))


class FixedCosts(CostMeter):
    """A meter that does not learn: forwards that a test holds up would look expensive."""

    def observe(self, num_rows: int, seconds: float) -> None:
        """Ignore the time of a forward."""

    def observe_stride(self, seconds: float) -> None:
        """Ignore the time of a call that decodes several tokens."""


class Target:
    """A loop that runs in a thread, and the far ends of its channels."""

    def __init__(self, stack: ExitStack, model: RecordingModel | None = None, **config: Any) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, theirs = Channel(near), Channel(far, send_timeout_s=20.0)  # a worker, too, waits for who does not read
        self.model = model or RecordingModel()
        self.api = Far(ours)
        self._stack = stack
        stack.callback(theirs.close)
        config = {"preservation": Preservation.UNIFORM, **config}  # which asks nothing of the target's attention
        costs = FixedCosts(base_s=1e-2, row_s=1e-5, draft_s=1e-4)
        self.loop = TargetLoop(cast("VideoLM", self.model), theirs, configure("target", **config), costs)
        self.thread = stack.enter_context(Running(self.loop, ours))

    def draft(self, *, is_full: bool = False, **about: bool) -> Far:
        """Connect a draft and return its end of the channel."""
        far = connect_peer(self.api.channel, is_full=is_full, **about)
        self._stack.callback(far.close)
        return far

    def submit(self, request: GenerationRequest) -> None:
        submit(self.api.channel, request)

    def forward(self) -> list[tuple[int, ...]]:
        """Let the model run the forward it is held at; returns the ids of that forward once it is held at the next."""
        self.model.gates["step"].let_through()
        self.model.gates["step"].wait_reached()
        return self.model.steps[-1]

    def forward_until(self, is_met: Callable[[list[tuple[int, ...]]], bool]) -> None:
        """Run forwards one by one until `is_met`; leaves time to prepare the next request in between."""
        while not is_met(self.forward()):
            wait_readable([], 0.02)
            self.api.poll()

    def wait_proposals(self, number: int) -> None:
        """Wait until so many proposals are kept for the request that is being prepared."""
        for _ in range(1000):
            (item,) = self.loop._scheduler.preparing.values()
            if len(item.proposals) == number:
                return
            wait_readable([], 0.02)
        raise AssertionError(f"there are {len(item.proposals)}")

    def hold(self) -> None:
        self.model.gates["step"].shut()

    def go_on(self) -> None:
        self.model.gates["step"].open()

    def end_of(self, name: str) -> Ended:
        heard = [ended for ended in self.api.of(Ended) if ended.request_id == name]  # another's end may come later
        return heard[0] if heard else self.api.next(Ended, lambda ended: ended.request_id == name)

    def tokens_of(self, name: str) -> list[Tokens]:
        return [tokens for tokens in self.api.of(Tokens) if tokens.request_id == name]

    def said_of(self, name: str) -> list[int]:
        return [token for tokens in self.tokens_of(name) for token in tokens.ids]


def propose(draft: Far, name: str, start: int, ids: list[int], *, epoch: int = 1, step_s: float = 1e-4) -> None:
    draft.channel.send(
        Proposal(
            request_id=name, epoch=epoch, start=start, ids=tuple(ids), confidences=(1.0,) * len(ids), step_s=step_s,
            video_tokens=16,
        )
    )  # fmt: skip


def begin(target: Target, draft: Far, name: str = "a", **changes: Any) -> list[int]:
    """Returns with the loop held at its first forward after the prompt; the draft knows the first token."""
    target.hold()
    target.submit(asked := request(name, **changes))
    assert draft.next(Follow).request_id == name
    text = text_of(name, asked.max_tokens or 0)
    verdict = draft.next(Verdict)
    assert (verdict.request_id, verdict.start, verdict.ids) == (name, 0, tuple(text[:1]))
    assert verdict.max_lead >= 12, "the tests count on it"
    target.model.gates["step"].wait_reached()
    return text


def test_proposals_are_verified_in_one_forward_and_committed_with_one_token_more(stack: ExitStack) -> None:
    target = Target(stack)
    draft = target.draft()
    text = begin(target, draft)
    propose(draft, "a", 1, text[1:4])
    propose(draft, "a", 4, text[4:7], step_s=0.0)  # forced, without a forward
    assert target.forward() == [tuple(text[:1])]
    assert target.forward() == [tuple(text[1:7])]
    assert target.loop._costs.draft_s == 1e-4
    target.go_on()
    target.end_of("a")
    assert target.said_of("a") == text
    first, alone, verified, *_ = target.tokens_of("a")
    assert [each.ids for each in (first, alone, verified)] == [(text[0],), (text[1],), tuple(text[2:8])]
    assert (alone.num_judged, verified.num_judged, verified.num_accepted) == (0, 5, 5)
    assert verified.draft_video_tokens == 16
    draft.next(Verdict, lambda verdict: verdict.start + len(verdict.ids) >= len(text) - 12)
    told = [token for verdict in draft.of(Verdict) for token in verdict.ids]
    assert told == text[: len(told)]
    assert len(told) >= len(text) - 12, "all but what the last forward committed"


def test_what_was_proposed_while_a_prompt_was_read_is_in_the_first_forward(stack: ExitStack) -> None:
    target = Target(stack, stream_interval_s=0.2)
    draft, text = target.draft(), text_of("a", 24)
    target.loop._costs.base_s, target.loop._costs.row_s = 1e-3, 2e-4  # too expensive rows to wait for proposals
    target.loop._acceptance = 0.98
    target.model.gates["prefill"].shut()
    target.submit(request("a"))
    target.model.gates["prefill"].wait_reached()
    target.model.gates["prefill"].let_through()
    target.model.gates["prefill"].wait_reached()  # held at the second and last chunk
    propose(draft, "a", 1, text[1:4])
    target.model.gates["prefill"].open()
    target.end_of("a")
    assert target.said_of("a") == text
    assert target.model.steps[0] == [tuple(text[:4])]
    assert target.tokens_of("a")[1].ids == tuple(text[1:5])


def test_a_wrong_proposal_ends_its_epoch_and_the_next_epoch_is_taken(stack: ExitStack) -> None:
    target = Target(stack)
    draft = target.draft()
    text = begin(target, draft)
    wrong = [(token + 1) % 32 for token in text]
    propose(draft, "a", 1, [*text[1:4], *wrong[4:7]])
    target.forward()
    assert target.forward() == [(*text[1:4], *wrong[4:7])]
    propose(draft, "a", 7, text[7:12])  # in transit when the epoch ended
    assert target.forward() == [(text[4],)]
    assert target.forward() == [(text[5],)]
    propose(draft, "a", 6, text[6:12], epoch=2)
    assert target.forward() == [(text[6],)]
    assert target.forward() == [tuple(text[7:12])]
    target.go_on()
    target.end_of("a")
    assert target.said_of("a") == text
    assert [(each.num_judged, each.num_accepted) for each in target.tokens_of("a")[2:3]] == [(3, 2)]
    assert sum(each.num_rollbacks for each in target.tokens_of("a")) == 1


@pytest.mark.parametrize("law", [SamplingParams(), SamplingParams(temperature=1.0, seed=5)], ids=["greedy", "sampled"])
def test_several_requests_share_their_forwards_and_no_token(stack: ExitStack, law: SamplingParams) -> None:
    target = Target(stack)
    draft = target.draft()
    names = ("a", "b", "c")
    texts = {name: text_of(name, 60, law) for name in names}
    target.hold()
    for name in names:
        target.submit(request(name, max_tokens=60, sampling=law))
    target.model.gates["step"].wait_reached()
    target.forward_until(lambda step: len(step) == len(names))
    for _ in range(4):  # a draft that is wrong at every fifth token
        draft.poll()
        for name in names:
            verdict = next(verdict for verdict in reversed(draft.of(Verdict)) if verdict.request_id == name)
            start = verdict.start + len(verdict.ids)
            guess = [token if at % 5 else 31 - token for at, token in enumerate(texts[name])]
            propose(draft, name, start, guess[start : start + 4], epoch=start)
        target.forward()
    target.go_on()
    for _ in names:
        target.api.next(Ended)
    assert {name: target.said_of(name) for name in names} == texts
    assert {any(tokens.num_accepted for tokens in target.tokens_of(name)) for name in names} == {True}


class Slow:
    """A grammar that allows everything and takes long to say so."""

    def __init__(self) -> None:
        self.has_begun, self._is_asked = Event(), Event()
        self.was_asked_early = False

    def forced(self, _: Sequence[int]) -> list[int]:
        return []

    def prepare(self, *_: Sequence[int]) -> None:
        self._is_asked.clear()
        self.has_begun.set()
        self.was_asked_early |= self._is_asked.wait(0.1)

    def check(self) -> None:
        self._is_asked.set()


def test_no_token_is_chosen_while_another_thread_is_at_work_on_its_mask(stack: ExitStack) -> None:
    target, grammar = Target(stack), Slow()
    begin(target, target.draft(), max_tokens=8)
    target.loop._scheduler.decoding["a"].grammar = cast("GrammarMask", grammar)
    for _ in range(2):
        target.forward()
        assert grammar.has_begun.wait(20)
        grammar.has_begun.clear()
    target.go_on()
    target.end_of("a")
    assert not grammar.was_asked_early


def test_the_draft_hears_of_tokens_before_the_api_does(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Message] = []
    send = Channel.send

    def noted(channel: Channel, message: Message, fds: tuple[int, ...] = ()) -> None:
        sent.append(message)
        send(channel, message, fds)

    monkeypatch.setattr(Channel, "send", noted)
    target = Target(stack)
    target.draft()
    target.submit(request("a", max_tokens=6))
    target.end_of("a")
    pairs = [type(message) for message in sent if isinstance(message, Verdict | Tokens)]
    assert pairs == [Verdict, Tokens] * 5 + [Tokens]  # no verdict after the end, since no proposal may follow


@pytest.mark.parametrize("how", ["it ends", "it does not read"])
def test_a_draft_that_is_lost_costs_no_token_and_is_missed(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("vidspec_service.engine.worker.loop.HEARTBEAT_S", 0.1)
    target = Target(stack)
    if how == "it ends":
        draft = target.draft()
        text = begin(target, draft)
        propose(draft, "a", 1, text[1:9])
        target.forward()
        draft.close()
        target.go_on()
    else:
        draft = target.draft(is_full=True)
        text = text_of("a", 24)
        target.submit(request("a"))
    target.end_of("a")
    assert target.said_of("a") == text
    asked = list[str]()
    monkeypatch.setattr(target.loop._gate, "ask", asked.append)
    target.submit(request("b"))
    target.end_of("b")
    assert not asked, "no core is lent to a draft that is gone"
    if how == "it does not read":
        draft.wait_closed()
    target.api.next(Heartbeat, lambda heartbeat: not heartbeat.has_peer)


@pytest.mark.parametrize(
    "lie",
    [{"ids": [256]}, {"ids": [2**64 - 1]}, {"ids": [-1]}, {"ids": ["a"]}, {"step_s": float("nan")}, {"step_s": -1.0},
     {"prepare_s": float("inf")}],
)  # fmt: skip
def test_a_draft_that_tells_nonsense_costs_no_token(stack: ExitStack, lie: dict[str, Any]) -> None:
    target = Target(stack)
    draft = target.draft()
    text = begin(target, draft)
    told: dict[str, Any] = {"ids": text[2:3], "step_s": 1e-4, "prepare_s": 0.0} | lie
    told["ids"] = (text[1], *told["ids"])
    draft.channel.send(
        Proposal(request_id="a", epoch=1, start=1, confidences=(1.0, 1.0), video_tokens=16, **told)
    )  # fmt: skip
    assert target.forward() == [tuple(text[:1])]
    assert target.forward() == [tuple(text[1:2])], "nothing of it was taken"
    assert target.loop._costs.draft_s == 1e-4
    target.go_on()
    target.end_of("a")
    assert target.said_of("a") == text


def test_what_is_not_tried_for_a_while_is_hoped_to_pay_again(stack: ExitStack) -> None:
    """One caller's requests may lower the acceptance rate; without new proposals it would stay low forever."""
    target = Target(stack)
    loop, costs = target.loop, StepCosts(base_s=0.4, row_s=0.1, draft_s=0.15, stride_s=0.35)

    def plan() -> Plan:
        speculation = SpeculationState(mode=SpeculationMode.AUTO, acceptance=loop._acceptance)
        speculation.replan(costs, take_turns=False)
        loop._remember(speculation)
        return speculation.plan

    for _ in range(20):
        bad = SpeculationState(mode=SpeculationMode.PARALLEL, acceptance=0.95)
        for _ in range(60):
            bad.observe(0, is_rejected=True)
        loop._remember(bad)
    assert plan().is_off
    for _ in range(40):
        loop._remember(SpeculationState(mode=SpeculationMode.OFF, acceptance=0.95))
    assert plan().is_off
    assert any(not plan().is_off for _ in range(40))


@pytest.mark.parametrize("draft", ["of/none", NGRAM])
def test_only_the_pace_of_a_model_is_doubted(stack: ExitStack, draft: str) -> None:
    loop = Target(stack, draft=WorkerConfig(model=draft)).loop
    before_s = loop._costs.draft_s
    loop._remember(SpeculationState(mode=SpeculationMode.AUTO, acceptance=0.9))
    assert (loop._costs.draft_s == before_s) == (draft == NGRAM)


def test_a_draft_that_falls_silent_is_not_waited_for_until_it_proposes_again(stack: ExitStack) -> None:
    target = Target(stack)
    draft = target.draft()
    text = begin(target, draft, max_tokens=100)
    (speculation,) = (each.speculation for each in target.loop._scheduler.decoding.values())
    enough = speculation.plan.min_draft_tokens
    propose(draft, "a", 1, text[1 : 2 + enough])  # its first token is committed before it arrives
    target.forward()
    assert speculation.is_followed
    target.forward()
    assert not speculation.is_followed
    propose(draft, "a", 3 + enough, text[3 + enough : 4 + 2 * enough], epoch=2)
    target.forward()
    assert speculation.is_followed
    target.go_on()
    target.end_of("a")


def test_whoever_arrives_while_proposals_are_waited_for_is_served_meanwhile(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting = Event()

    def noted(*given: Any) -> None:
        is_waiting.set()
        wait_readable(*given)

    monkeypatch.setattr("vidspec_service.engine.target.loop._WAIT_RATIO", 1e7)
    monkeypatch.setattr("vidspec_service.engine.target.loop.wait_readable", noted)
    target = Target(stack, prefill_chunk=40)
    draft = target.draft()
    text = begin(target, draft)
    propose(draft, "a", 1, text[1:3])
    target.go_on()
    assert is_waiting.wait(20)
    is_waiting.clear()
    target.model.gates["prepare"].shut()
    target.submit(request("b"))
    target.model.gates["prepare"].wait_reached()
    assert is_waiting.wait(20)
    target.model.gates["prepare"].open()
    target.api.next(Tokens, lambda tokens: tokens.request_id == "b")


def test_a_new_draft_is_told_everything_and_the_old_ones_chain_is_void(stack: ExitStack) -> None:
    target = Target(stack, Seeing(), preservation=Preservation.HIPPO)
    first = target.draft()
    text = begin(target, first)
    propose(first, "a", 1, text[1:7], epoch=9)
    target.forward()
    second = target.draft()
    first.close()
    assert target.forward() == [tuple(text[1:7])]
    known = 8
    assert second.next(Follow).request_id == "a"
    verdict = second.next(Verdict)
    assert (verdict.start, verdict.ids) == (0, tuple(text[:known]))
    assert second.next(Relevance).request_id == "a"
    assert target.forward() == [(text[known - 1],)]
    propose(second, "a", known, text[known : known + 5], epoch=1)
    target.forward()
    assert target.forward()[0][1:] == tuple(text[known + 2 : known + 5])
    target.go_on()
    target.end_of("a")
    assert target.said_of("a") == text


def test_a_request_that_nobody_waits_beside_is_decoded_in_growing_strides(stack: ExitStack) -> None:
    target = Target(stack, stream_interval_s=0.2)
    told = frozenset({Include.TIMELINE})
    target.submit(request("a", max_tokens=60, speculation=SpeculationMode.OFF, include=told))
    target.end_of("a")
    assert target.said_of("a") == text_of("a", 60)
    assert target.model.strides == [2, 4, 8, 16, 16, 13]  # after the first token
    assert [work.num_tokens for tokens in target.tokens_of("a") for work in tokens.work] == target.model.strides
    assert target.model.steps == []


def test_strides_are_no_longer_than_tokens_are_kept_back(stack: ExitStack) -> None:
    target = Target(stack, stream_interval_s=0.035)  # a forward takes 0.01 s
    target.submit(request("a", speculation=SpeculationMode.OFF))
    target.end_of("a")
    assert max(target.model.strides) == 3
    assert target.model.longest_s == pytest.approx(3 * 0.035), "or nobody is told anything where cores are lacking"


@pytest.mark.parametrize(("interval_s", "is_kept"), [(0.2, True), (0.09, False)])
def test_a_token_is_not_reckoned_cheaper_for_strides_that_there_are_none_of(
    stack: ExitStack, interval_s: float, is_kept: bool
) -> None:
    """A large model's tokens are sent one by one, so it never decodes several in one call."""
    ours, theirs = Channel.pair()
    stack.callback(theirs.close)
    stack.callback(ours.close)
    costs = CostMeter(base_s=0.06, row_s=1e-5, draft_s=1e-2, stride_s=0.05)
    TargetLoop(cast("VideoLM", RecordingModel()), theirs, configure("target", stream_interval_s=interval_s), costs)
    assert costs.costs(1, in_strides=True).alone_s == (0.05 if is_kept else pytest.approx(0.06001))


@pytest.mark.parametrize("most_kept", [0, 1])
def test_a_model_that_mostly_wants_what_is_not_allowed_is_seldom_asked_for_more(
    stack: ExitStack, most_kept: int
) -> None:
    target = Target(stack, stream_interval_s=0.2)
    target.model.most_kept = most_kept
    target.submit(request("a", max_tokens=60, speculation=SpeculationMode.OFF))
    target.end_of("a")
    assert target.said_of("a") == text_of("a", 60)
    assert len(target.model.steps) == 59 - most_kept * len(target.model.strides)
    assert set(target.model.strides) == {2}
    assert len(target.model.strides) == -(-len(target.model.steps) // 14)


def test_two_requests_share_forwards_and_neither_is_decoded_in_strides(stack: ExitStack) -> None:
    target = Target(stack, stream_interval_s=0.2)
    target.hold()
    off = SpeculationMode.OFF
    target.submit(request("a", max_tokens=40, speculation=off, logprobs=0))  # log probabilities need single rows
    target.submit(request("b", speculation=off))
    target.model.gates["step"].wait_reached()
    target.forward_until(lambda step: len(step) == 2)
    target.go_on()
    for _ in range(2):
        target.api.next(Ended)
    assert (target.said_of("a"), target.said_of("b")) == (text_of("a", 40), text_of("b", 24))
    assert target.model.strides == []


def test_a_request_whose_draft_is_too_slow_to_pay_goes_on_in_strides(stack: ExitStack) -> None:
    target = Target(stack, stream_interval_s=0.2)
    draft = target.draft()
    text = begin(target, draft, max_tokens=60, speculation=SpeculationMode.AUTO, logprobs=0)
    propose(draft, "a", 1, text[1:3], step_s=0.02)
    target.forward_until(lambda _: len(target.model.steps) > 12)
    (request_,) = target.loop._scheduler.decoding.values()
    assert request_.speculation.plan.is_off
    request_.speculation.is_followed = True  # as if a draft followed it without a wait
    request_.asked = replace(request_.asked, logprobs=None)  # until now they prevented decoding several tokens per call
    target.go_on()
    target.end_of("a")
    assert target.said_of("a") == text
    assert len(target.model.strides) > 3


def test_what_a_draft_is_told_of_a_stride_is_all_of_it(stack: ExitStack) -> None:
    target = Target(stack, stream_interval_s=0.2)
    draft, text = target.draft(), text_of("a", 24)
    target.submit(request("a"))
    target.end_of("a")
    draft.poll()
    told = [token for verdict in draft.of(Verdict) for token in verdict.ids]
    assert target.said_of("a") == text
    assert told == text[: len(told)]
    assert len(told) > 8


@pytest.mark.parametrize("is_chunk_invariant", [True, False])
def test_a_prompt_is_cut_where_a_stream_would_wait_for_it_or_bits_hang_on_it(
    stack: ExitStack, *, is_chunk_invariant: bool
) -> None:
    model = RecordingModel()
    model.is_chunk_invariant = is_chunk_invariant
    target = Target(stack, model)
    target.hold()
    target.submit(request("stream-1", max_tokens=200))
    model.gates["step"].wait_reached()
    num_rows = sum(model.chunks)
    as_set = [128, num_rows - 128]
    assert model.chunks == ([num_rows] if is_chunk_invariant else as_set)
    model.chunks.clear()
    target.submit(request("stream-2", max_tokens=2))
    target.forward_until(lambda _: "stream-2" in [accepted.request_id for accepted in target.api.of(PromptReady)])
    target.go_on()
    target.end_of("stream-2")
    assert model.chunks == ([64, 64, num_rows - 128] if is_chunk_invariant else as_set)
    target.end_of("stream-1")
    assert target.said_of("stream-1") == text_of("stream-1", 200)


@pytest.mark.parametrize("state", ["waiting", "prepare", "prefill", "step", "paused"])
def test_a_cancelled_request_leaves_nothing_behind_wherever_it_is(stack: ExitStack, state: str) -> None:
    """The cache has room for one prompt and the scheduler for two requests, so that a leaked row is noticed."""
    target = Target(
        stack, kv_cache_tokens=FOR_ONE, max_running_requests=1 if state == "waiting" else 2, prefill_chunk=40
    )
    draft = target.draft()
    gate = target.model.gates[state if state in target.model.gates else "step"]
    gate.shut()
    if state in ("waiting", "paused"):
        target.submit(request("older", max_tokens=40))
        gate.wait_reached()
    target.submit(request("gone"))
    if state == "paused":
        target.forward_until(lambda _: "gone" in [accepted.request_id for accepted in target.api.of(PromptReady)])
        for _ in range(3):
            target.forward()  # one chunk of the younger prompt fits, the next does not
    elif state != "waiting":
        gate.wait_reached()
    target.api.channel.send(Cancel(request_id="gone"))
    propose(draft, "gone", 1, [1, 2, 3])
    gate.open()
    target.submit(request("next", max_tokens=40))
    target.end_of("next")
    assert target.said_of("next") == text_of("next", 40)
    assert not [ended for ended in target.api.of(Ended) if ended.request_id == "gone"]
    assert not target.api.of(Rejected)
    assert len(target.said_of("gone")) < 24
    assert not target.loop._gate.is_asked("gone")


def test_a_request_that_is_cancelled_before_its_turn_is_not_prepared(stack: ExitStack) -> None:
    prepared: list[str] = []

    class Noting(RecordingModel):
        def prepare(self, turns: Sequence[Turn], *rest: Any) -> Prompt:
            prepared.append(turns[-1].text)
            return super().prepare(turns, *rest)

    target = Target(stack, Noting())
    draft = target.draft()
    target.model.gates["prepare"].shut()
    for name in ("first", "gone"):
        target.submit(request(name))
    target.model.gates["prepare"].wait_reached()
    draft.next(Follow, lambda asked: asked.request_id == "gone")
    target.api.channel.send(Cancel(request_id="gone"))
    target.submit(request("last"))
    draft.next(Follow, lambda asked: asked.request_id == "last")
    target.model.gates["prepare"].open()
    target.end_of("last")
    assert prepared == ["first", "last"]


@pytest.mark.parametrize("num_known", [0, 1, 2, 17, 18, 40, 60])
def test_a_target_that_takes_over_says_the_rest_and_only_the_rest(stack: ExitStack, num_known: int) -> None:
    target = Target(stack)
    draft = target.draft()
    text = text_of("a", 60)
    target.submit(request("a", max_tokens=60, committed=tuple(text[:num_known])))
    target.end_of("a")
    assert target.said_of("a") == text[num_known:]
    if num_known < 60:
        assert draft.next(Verdict).ids == tuple(text[: max(num_known, 1)])


def test_streams_go_on_while_the_rows_of_a_long_answer_are_recomputed(stack: ExitStack) -> None:
    target = Target(stack, prefill_chunk=16)
    target.hold()
    target.submit(request("other", max_tokens=400, speculation=SpeculationMode.OFF))
    target.model.gates["step"].wait_reached()
    text = text_of("a", 202)
    target.submit(request("a", max_tokens=202, committed=tuple(text[:200]), speculation=SpeculationMode.OFF))
    target.go_on()
    target.end_of("a")
    assert target.said_of("a") == text[200:]
    replays = [at for at, step in enumerate(target.model.steps) if len(step[0]) > 1]
    assert len(replays) == 13
    assert all(later - at > 1 for at, later in pairwise(replays))


@pytest.mark.parametrize("oldest", ["old", "old, and with so much to read that it is overtaken by the others"])
def test_requests_that_do_not_fit_together_take_turns_and_lose_nothing(stack: ExitStack, oldest: str) -> None:
    target = Target(stack, kv_cache_tokens=FOR_TWO_FOR_A_WHILE + len(oldest), prefill_chunk=40)
    names = (oldest, "young", "third")
    for name in names:
        target.submit(request(name, max_tokens=60, speculation=SpeculationMode.OFF))
    for _ in names:
        target.api.next(Ended)
    assert {name: target.said_of(name) for name in names} == {name: text_of(name, 60) for name in names}
    replays = [step for step in target.model.steps if len(step) == 1 and len(step[0]) > 1]
    assert replays, "nobody was paused: the test proves nothing"
    assert len(target.api.of(PromptReady)) == len(names)


def test_a_broken_prompt_is_refused_and_the_next_request_is_served(stack: ExitStack) -> None:
    target = Target(stack, max_context=CELLS + 20)
    target.submit(request("a", max_tokens=100))
    refused = target.api.next(Rejected)
    assert (refused.request_id, refused.reason) == ("a", RejectReason.TOO_LONG)
    target.submit(request("b", max_tokens=4))
    target.end_of("b")
    assert target.said_of("b") == text_of("b", 4)


def test_a_request_that_waits_for_a_place_begins_as_soon_as_there_is_one(stack: ExitStack) -> None:
    target = Target(stack, max_running_requests=1)
    target.hold()
    for name in ("a", "b"):
        target.submit(request(name, max_tokens=4, speculation=SpeculationMode.OFF))
    target.model.gates["step"].wait_reached()
    target.go_on()
    target.end_of("b")
    assert target.said_of("b") == text_of("b", 4)


def paused(stack: ExitStack) -> tuple[Target, Far, int]:
    """Returns with the loop held in a forward for `old`, which preempted `young`, and `young`'s committed tokens."""
    target = Target(stack, kv_cache_tokens=FOR_TWO_FOR_A_WHILE)
    draft = target.draft()
    target.hold()
    target.submit(request("old", max_tokens=100, speculation=SpeculationMode.OFF))
    target.submit(request("young", max_tokens=60))
    target.model.gates["step"].wait_reached()
    target.forward_until(lambda step: len(step) == 2)
    target.forward_until(lambda step: len(step) == 1)
    target.api.poll()
    return target, draft, len(target.said_of("young"))


def resume(target: Target) -> None:
    """Cancel `old`; returns with the loop held in the first forward of `young` after its rows were recomputed."""
    target.api.channel.send(Cancel(request_id="old"))
    target.forward()
    assert len(target.forward()[0]) > 1


def test_what_was_proposed_for_a_paused_request_is_verified_when_it_resumes(stack: ExitStack) -> None:
    target, draft, known = paused(stack)
    text = text_of("young", 60)
    propose(draft, "young", known, text[known : known + 6])
    target.forward()
    resume(target)
    assert target.forward() == [tuple(text[known - 1 : known + 6])]
    target.go_on()
    target.end_of("young")
    assert target.said_of("young") == text


def test_a_draft_that_came_while_a_request_was_paused_is_told_everything_when_it_resumes(stack: ExitStack) -> None:
    target, _, known = paused(stack)
    second = target.draft()
    target.forward()
    resume(target)
    assert second.next(Follow).request_id == "young"
    verdict = second.next(Verdict)
    assert (verdict.start, verdict.ids) == (0, tuple(text_of("young", 60)[:known]))
    target.go_on()
    target.end_of("young")


@pytest.mark.parametrize("shares_tower", [False, True])
def test_a_draft_with_the_same_tower_is_asked_once_that_has_run(stack: ExitStack, shares_tower: bool) -> None:
    class Failing(RecordingModel):
        def prepare(self, *_: Any) -> Any:
            raise ValueError("there is no such video")

    target = Target(stack, Failing())
    draft = target.draft(shares_tower=shares_tower)
    target.submit(request("a"))
    target.api.next(Rejected)
    if shares_tower:
        draft.poll()
        assert not draft.of(Follow)
    else:
        draft.next(Follow)


def test_a_draft_that_took_longer_to_prepare_than_an_answer_takes_is_not_asked_again(stack: ExitStack) -> None:
    """Its first proposal tells how long that was; those after it tell nothing."""
    target = Target(stack)
    draft, text = target.draft(), text_of("a", 24)
    target.hold()
    target.submit(request("a", speculation=SpeculationMode.AUTO))
    draft.next(Verdict)
    draft.channel.send(
        Proposal(
            request_id="a", epoch=1, start=1, ids=(text[1],), confidences=(1.0,), step_s=1e-4, video_tokens=16,
            prepare_s=60.0,
        )
    )  # fmt: skip
    propose(draft, "a", 2, text[2:4])
    target.go_on()
    target.end_of("a")
    target.submit(request("b", speculation=SpeculationMode.AUTO))
    target.end_of("b")
    draft.poll()
    assert [follow.request_id for follow in draft.of(Follow)] == ["a"]


def test_on_a_shared_gpu_the_target_leaves_it_to_a_new_draft_until_that_proposes(stack: ExitStack) -> None:
    """While the target computes, each small kernel of the draft's prompt would wait for it."""
    target = Target(stack)
    draft = target.draft(shares_gpu=True)
    target.loop._gate.observe(60.0)  # what earlier drafts took: this one is awaited for as long as the test needs
    target.hold()
    target.submit(request("a"))
    draft.next(Verdict)
    assert [type(said) for said in draft.heard] == [Follow, Verdict], "asked when the prompt is done, not before"
    wait_readable([], 0.05)
    assert not target.model.steps
    text = text_of("a", 24)
    propose(draft, "a", 1, text[1:13])
    target.model.gates["step"].wait_reached()
    assert target.forward() == [tuple(text[:13])]
    target.go_on()
    target.end_of("a")
    assert target.said_of("a") == text


def test_on_a_shared_gpu_a_draft_knows_the_attention_when_it_is_asked(stack: ExitStack) -> None:
    """It chooses what it sees once, and prefills its prompt once."""
    target = Target(stack, Seeing(), preservation=Preservation.HIPPO)
    draft = target.draft(shares_gpu=True)
    target.submit(request("a"))
    draft.next(Verdict)
    assert [type(said) for said in draft.heard] == [Relevance, Follow, Verdict]
    target.end_of("a")


def awaiting(stack: ExitStack, **changes: Any) -> tuple[Target, Far]:
    """A target that waits for the first proposal to "a", for minutes, since earlier drafts took as long."""
    target = Target(stack)
    draft = target.draft(shares_gpu=True)
    target.loop._gate.observe(60.0)
    target.submit(request("a", **changes))
    draft.next(Verdict)
    return target, draft


def test_on_a_shared_gpu_no_stream_stands_still_for_anothers_draft(stack: ExitStack) -> None:
    """Nor does a request that arrives while the target waits."""
    target, _ = awaiting(stack, max_tokens=200)
    target.submit(request("b", speculation=SpeculationMode.OFF))
    target.end_of("b")
    target.end_of("a")
    assert target.said_of("a") == text_of("a", 200)


def test_on_a_shared_gpu_a_draft_that_declines_is_not_awaited(stack: ExitStack) -> None:
    target, draft = awaiting(stack)
    draft.channel.send(Declined(request_id="a"))
    target.end_of("a")
    assert target.said_of("a") == text_of("a", 24)


def test_on_a_shared_gpu_auto_does_not_wait_in_vain_at_each_answer(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that needs longer than the whole answer never tells how long."""
    monkeypatch.setattr("vidspec_service.engine.target.draft_gate._MIN_PROPOSAL_TIMEOUT_S", 0.5)
    target = Target(stack)
    draft = target.draft(shares_gpu=True)
    for name in "abcd":  # 24 tokens save a quarter of a second at most
        target.submit(request(name, speculation=SpeculationMode.AUTO))
        target.end_of(name)
    draft.poll()
    assert [follow.request_id for follow in draft.of(Follow)] == ["a", "b"]


def test_a_target_that_waits_for_a_draft_is_heard_of(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the API would take it for one that hangs, and kill it."""
    for module in ("worker", "target"):
        monkeypatch.setattr(f"vidspec_service.engine.{module}.loop.HEARTBEAT_S", 0.05)
    target, draft = awaiting(stack)
    for _ in range(3):
        target.api.next(Heartbeat)
    assert not target.model.steps
    draft.close()
    target.end_of("a")


def test_on_a_shared_gpu_nobody_waits_for_draft_tokens_that_an_answer_has_no_room_for(stack: ExitStack) -> None:
    target = Target(stack)
    draft = target.draft(shares_gpu=True)
    target.loop._gate.observe(60.0)
    target.submit(request("a", max_tokens=2))
    target.end_of("a")
    draft.poll()
    assert not draft.heard


@pytest.mark.parametrize("is_gone", [True, False])
def test_on_a_shared_gpu_a_draft_that_never_proposes_is_not_awaited_for_ever(stack: ExitStack, is_gone: bool) -> None:
    target = Target(stack)
    draft = target.draft(shares_gpu=True)
    if is_gone:
        target.loop._gate.observe(60.0)  # what earlier drafts took: one that is there would be awaited for minutes
    target.submit(request("a"))
    draft.next(Verdict)
    if is_gone:
        draft.close()
    target.end_of("a")
    assert target.said_of("a") == text_of("a", 24)


class Seeing(RecordingModel):
    """A model whose tower output is larger than a channel's buffer."""

    rows = TowerOutput(placeholder_text="<video>" * 100_000, rows=np.arange(24, dtype=np.float32).reshape(2, 3, 4))

    def __init__(self) -> None:
        super().__init__()
        self.num_handed_on = self.num_observed = 0

    def prepare(self, *given: Any) -> Prompt:
        returns_tower_output = given[-1].returns_tower_output
        self.num_handed_on += returns_tower_output
        return replace(super().prepare(*given), tower=(self.rows,) if returns_tower_output else ())

    def prefill(self, prompt: Prompt, cache: KVCache, num_rows: int, observer: Any = None) -> Tensor | None:
        if observer is not None:
            observer.note(0, torch.ones(num_rows - observer.first, 1, 2))
            self.num_observed += 1
        return super().prefill(prompt, cache, num_rows)


def test_what_the_tower_has_made_of_the_videos_goes_to_the_draft_with_the_question(stack: ExitStack) -> None:
    target = Target(stack, Seeing())
    near, far = Channel.pair()
    target.api.channel.send(Peer(shares_tower=True), (near.fileno(),))
    near.close()
    stack.callback(far.close)
    target.model.gates["prefill"].shut()  # the draft need not wait for our prefill
    target.submit(request("a"))
    wait_readable([far], 20)
    received = far.receive()
    assert received is not None
    asked, fds = received
    assert isinstance(asked, Follow)
    (given,) = TowerMemory(*fds).read()
    assert (given.placeholder_text, given.rows.tolist()) == (Seeing.rows.placeholder_text, Seeing.rows.rows.tolist())
    target.model.gates["prefill"].open()
    target.end_of("a")


@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
def test_what_the_draft_proposes_during_the_prefill_is_verified_right_after_it(
    stack: ExitStack, is_right: bool
) -> None:
    target, text = Target(stack, Seeing(), prefill_chunk=32), text_of("a", 24)
    draft = target.draft(shares_tower=True)
    target.model.gates["prefill"].shut()
    target.hold()
    target.submit(request("a"))
    assert draft.next(Follow).max_lead > 8
    target.model.gates["prefill"].wait_reached()
    propose(draft, "a", 0, [text[0] if is_right else text[0] + 1, *text[1:8]], epoch=0)
    target.model.gates["prefill"].open()
    target.model.gates["step"].wait_reached()
    assert draft.next(Verdict).ids == (text[0],)
    assert target.forward() == [tuple(text[:8] if is_right else text[:1])]
    target.go_on()
    target.end_of("a")
    assert target.said_of("a") == text
    assert target.tokens_of("a")[0].num_rollbacks == (not is_right)


@pytest.mark.parametrize("is_lost", [False, True], ids=["same draft", "new draft"])
def test_what_a_draft_with_a_tower_of_its_own_proposes_may_come_before_the_targets_prompt(
    stack: ExitStack, is_lost: bool
) -> None:
    target, text = Target(stack), text_of("a", 24)
    draft = target.draft()
    target.model.gates["prepare"].shut()
    target.hold()
    target.submit(request("a"))
    assert draft.next(Follow).max_lead > 8
    target.model.gates["prepare"].wait_reached()
    propose(draft, "a", 0, text[:3], epoch=0)
    propose(draft, "a", 3, text[3:8], epoch=0)
    target.wait_proposals(2)
    if is_lost:
        target.draft()
        target.wait_proposals(0)
    target.model.gates["prepare"].open()
    target.model.gates["step"].wait_reached()
    assert target.forward() == [tuple(text[:1] if is_lost else text[:8])]
    target.go_on()
    target.end_of("a")
    assert target.said_of("a") == text


def test_where_models_take_turns_the_draft_does_not_begin_during_the_prefill(stack: ExitStack) -> None:
    target = Target(stack, Seeing())
    draft = target.draft(shares_tower=True)
    target.submit(request("a", speculation=SpeculationMode.SERIAL))
    assert draft.next(Follow).max_lead == 0
    target.end_of("a")


def test_videos_are_prepared_for_the_room_that_the_server_has(stack: ExitStack) -> None:
    class Noting(RecordingModel):
        room: int | None = None

        def prepare(self, *given: Any) -> Prompt:
            self.room = given[-1].context_length
            return super().prepare(*given)

    target = Target(stack, model := Noting(), max_context=200)
    target.submit(request("a", max_tokens=3))
    target.api.next(PromptReady)
    assert model.room == 200


def test_a_draft_that_is_not_asked_costs_the_target_nothing(stack: ExitStack) -> None:
    """Relevance scores for the draft are measured only once the target asks it to follow."""

    class Slow(Seeing):
        def prepare(self, *given: Any) -> Prompt:
            wait_readable([], 0.1)  # too slow for a draft to pay off among many requests
            return super().prepare(*given)

    target = Target(stack, model := Slow(), preservation=Preservation.HIPPO)
    target.loop._costs = FixedCosts(base_s=1e-3, row_s=1e-6, draft_s=1e-5)
    draft = target.draft(shares_tower=True)
    begin(target, draft, "first", max_tokens=100)
    target.submit(request("off", max_tokens=100, speculation=SpeculationMode.OFF))
    target.submit(request("second", max_tokens=160, speculation=SpeculationMode.AUTO))
    target.forward_until(lambda step: len(step) == 3)
    draft.poll()
    assert [asked.request_id for asked in draft.of(Follow)] == ["first"]
    assert [told.request_id for told in draft.of(Relevance)] == ["first"]
    assert (model.num_handed_on, model.num_observed) == (1, 2), "of 'off' nobody will ever read anything"
    target.go_on()
    target.end_of("first")
    target.end_of("off")
    assert draft.next(Follow, lambda asked: asked.request_id == "second")
    draft.next(Relevance, lambda told: told.request_id == "second")
    target.end_of("second")
    assert target.said_of("second") == text_of("second", 160)


def test_without_room_for_what_the_tower_makes_the_draft_runs_its_own(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    target = Target(stack, Seeing())
    draft = target.draft(shares_tower=True)
    monkeypatch.setattr(TowerMemory, "of", full)
    target.submit(request("a"))
    assert draft.next(Follow).request_id == "a"
    target.end_of("a")
    assert target.said_of("a") == text_of("a", 24)
