"""The proposal protocol under random schedules: whatever happens, the committed text is the target's.

Verification, proposals, plans and caches are real; only the models and the channel between the two sides are fakes. The
models' cache rows hold tokens, so that every row can be checked and a wrong one gives wrong text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, takewhile
from math import ceil
from operator import mul
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from tests.unit.engine.counting_model import CELLS, CountingModel
from tests.unit.engine.recording_model import RecordingModel, answer_rows, prompt_rows, rows_of
from tests.unit.engine.requests import request_of
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.grammar import GrammarMask
from vidspec_models.logits_processors import make_logits_processors
from vidspec_models.preservation.selection import Candidates, Strategy
from vidspec_models.prompt import Prompt, grid_checksum
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode, Turn
from vidspec_models.sampling import CoupledSampler, sample_all
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.draft.loop import Proposer
from vidspec_service.engine.draft.request import DraftRequest, PrunedView
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Follow, Message, Proposal, Tokens, Verdict
from vidspec_service.engine.ipc.payload import CellScores
from vidspec_service.engine.speculation.plan import MAX_AHEAD, MAX_DRAFT_TOKENS, Plan, SpeculationState
from vidspec_service.engine.speculation.proposals import DraftSequence, ProposalChain
from vidspec_service.engine.target.draft_link import DraftLink
from vidspec_service.engine.target.request import TargetRequest

CACHE_ROWS = 400
_FORCED_RUN = 3
ALL = 1000  # messages


@cache
def prompt() -> Prompt:
    return RecordingModel().prepare([Turn(role="user", parts=("what?",))], [], EncoderCache(0))


def new_cache() -> KVCache:
    return KVCache(CountingModel.decoder.geometry, CACHE_ROWS)


def pointed_at(cells: Candidates, relevance: Tensor | None) -> Tensor:
    """Consecutive cells, starting at the most relevant one."""
    first = 0 if relevance is None else int(relevance.argmax())
    return torch.arange(first, first + cells.budget) % CELLS


@dataclass
class Wire:
    """The target's end of a channel whose messages arrive when the schedule says so."""

    sent: deque[Message] = field(default_factory=deque)
    arrived: deque[Message] = field(default_factory=deque)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        self.sent.append(message)

    def receive(self) -> tuple[Message, list[int]] | None:
        return (self.arrived.popleft(), []) if self.arrived else None

    def close(self) -> None:
        """Close; messages in transit are lost."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One request and the two models."""

    agreement: int = 10  # at how many of 10 positions the draft agrees with the target
    vocabulary: int = 8
    salt: int = 0
    temperature: float = 0.0
    max_tokens: int = 40
    stop_ids: frozenset[int] = frozenset()
    forced_every: int = 0  # a grammar forces three tokens at every so many positions

    is_penalised: bool = False  # by the tokens so far, so that a row's position in the answer matters

    def sampler(self) -> CoupledSampler:
        """A new sampler, as each worker makes its own."""
        law = SamplingParams(temperature=self.temperature, seed=self.salt)
        request = GenerationRequest(request_id="r", turns=(), sampling=law)
        if self.is_penalised:
            law = replace(law, frequency_penalty=0.7, repetition_penalty=1.2, bad_word_ids=((1, 2), (3, 0, 4), (5, 5)))
            request = replace(request, sampling=law, min_tokens=self.max_tokens // 2)
        return CoupledSampler(law, make_logits_processors(request, prompt().ids, self.stop_ids))

    def model(self) -> RecordingModel:
        return RecordingModel(vocabulary=self.vocabulary, agreement=self.agreement, salt=self.salt)

    def text(self) -> list[int]:
        """The answer of the target alone."""
        text = self.model().answer(prompt(), self.max_tokens, self.sampler())
        ends = [place + 1 for place, token in enumerate(text) if token in self.stop_ids]
        return text[: min(ends, default=self.max_tokens)]


class Certainty:
    """A grammar that forces some tokens of a text; it excludes nothing the target would choose without it."""

    def __init__(self, text: list[int], every: int) -> None:
        self._text = text
        self._every = every

    def forced(self, prefix: Sequence[int]) -> list[int]:
        at = len(prefix)
        if not self._every or at % self._every >= _FORCED_RUN or list(prefix) != self._text[:at]:
            return []
        return self._text[at : at + _FORCED_RUN - at % self._every]

    def check(self) -> None:
        """Nothing was excluded."""


@dataclass
class Said:
    """What was sent over one connection between target and draft, recorded to check both against it."""

    told: int = 0  # committed tokens in verdicts
    chains: dict[int, list[int]] = field(default_factory=dict)  # by epoch: all tokens that the draft proposed
    chances: dict[int, list[float]] = field(default_factory=dict)  # by epoch: the draft's confidence in each
    taken: list[Proposal] = field(default_factory=list)
    num_judged: int = 0  # verified draft tokens: those accepted, and the first rejected
    num_wasted_before: int = 0  # by earlier drafts
    num_wasted_told: int = 0
    num_rollbacks_told: int = 0

    def still_holds(self, committed: list[int]) -> tuple[list[int], tuple[float, ...]]:
        """The newest chain's tokens after `committed`, with confidences; empty if the chain contradicts `committed`."""
        newest = max((proposal.epoch for proposal in self.taken), default=0)
        chain = [proposal for proposal in self.taken if proposal.epoch == newest]
        if not chain:
            return [], ()
        ids = [token for proposal in chain for token in proposal.ids]
        confidences = tuple(each for proposal in chain for each in proposal.confidences)
        known = committed[chain[0].start :]
        num_judged = min(len(ids), len(known))
        if ids[:num_judged] != known[:num_judged]:
            return [], ()
        return ids[len(known) :], confidences[len(known) :]


class World:
    """Draft, target and the messages in transit, advanced one event at a time and checked against the protocol."""

    def __init__(self, scene: Scene, plan: Plan) -> None:
        self.scene = scene
        self.target_model, self.draft_model = scene.model(), scene.model()
        self.text = scene.text()
        self.certainty = cast("GrammarMask", Certainty(self.text, scene.forced_every))
        self.plan, self.least_likely = plan, 0.0  # apply from the next verdict on
        self.num_requests = 0
        self.num_verifications = self.num_lonely = 0
        self.link = DraftLink()
        self.proposals = deque[Proposal]()  # in transit
        self._connect()
        self.ask()

    @property
    def committed(self) -> list[int]:
        return self.target.committed

    @property
    def has_ended(self) -> bool:
        return self.target.finish_reason is not None

    def ask(self) -> None:
        """A request arrives at both; messages about the previous one may still be in transit."""
        self.num_requests += 1
        self.name = f"request {self.num_requests}"
        self.said = Said()
        self._start_target([])
        self._start_draft()
        self.draft.handle(Follow(request_id=self.name, max_lead=self.plan.max_lead))
        self.heard_lead = self.plan.max_lead

    def cancel(self) -> None:
        """The client has left; the next client asks the same."""
        self.ask()

    def verify(self) -> None:
        """One forward of the target; the first is the prompt's, which gives the first token."""
        if self.first is not None:
            self._choose_first(self.first)
            return
        if self.has_ended:
            return
        running, before = self.target, list(self.committed)
        pending = running.pending()
        self._check_pending(pending)
        rows = running.rows(pending)
        assert list(rows.ids) == [*before[-1:], *pending]
        held, _ = self.said.still_holds(before)
        (logits,) = self.target_model.step([rows])
        (chosen,) = sample_all([(running.sampler, logits, before, pending)])
        judged = self._judge(before, pending, chosen, held)
        self.num_verifications += 1
        self.num_lonely += not judged.num_accepted
        if not self.has_ended:
            self._tell()

    def _choose_first(self, logits: Tensor) -> None:
        self.first = None
        held, _ = self.said.still_holds([])
        self._judge([], [], self.target.sampler.sample(logits[None], []), held)
        self._tell()

    def _judge(self, before: list[int], pending: list[int], chosen: list[int], held: list[int]) -> Tokens:
        judged = self.target.judge(pending, chosen)
        self.said.num_wasted_told += judged.num_wasted
        self.said.num_rollbacks_told += judged.num_rollbacks
        assert self.target.speculation.chain.take_losses() == (0, 0), "what was told would be told again"
        self._check_judged(judged, before, pending, held)
        return judged

    def _check_pending(self, pending: list[int]) -> None:
        """The pending tokens are the draft's tokens for the positions after the committed ones, limited by plan and
        answer length; without such tokens, those that the grammar forces. None ends the answer.
        """
        speculation = self.target.speculation
        held, confidences = self.said.still_holds(self.committed)
        likely = takewhile(lambda each: each >= speculation.least_likely, accumulate(confidences, mul))
        doubts = accumulate(confidence < 1.0 for confidence in confidences)
        within = takewhile(lambda number: number <= speculation.plan.max_draft_tokens, doubts)
        num_left = self.scene.max_tokens - len(self.committed)
        if not held:
            assert pending == self._before_end(self.certainty.forced(self.committed)[: num_left - 1])
            return
        most = 0 if speculation.plan.is_off else min(MAX_DRAFT_TOKENS, num_left - 1)
        assert pending == self._before_end(held[: min(len(list(likely)), len(list(within)), most)])
        said = [*self.committed, *pending]
        assert not pending or any(chain[: len(said)] == said for chain in self.said.chains.values())

    def _before_end(self, ids: list[int]) -> list[int]:
        return list(takewhile(lambda token: token not in self.scene.stop_ids, ids))

    def _check_judged(self, judged: Tokens, before: list[int], pending: list[int], held: list[int]) -> None:
        """All correct draft tokens are accepted, plus one token of the target: never fewer, never another."""
        rest = self.text[len(before) :]
        met = held[: len(pending) + 1]
        num_right = next((i for i, (said, true) in enumerate(zip(met, rest, strict=False)) if said != true), len(met))
        num_new = (min(num_right, len(pending)) if held else len(pending)) + 1  # forced tokens are right
        assert judged.ids == tuple(rest[:num_new])
        num_judged = num_right + (num_right < len(met))
        self.said.num_judged += num_judged
        if not self.has_ended:
            assert (judged.num_judged, judged.num_accepted) == (num_judged, num_right)

    def propose(self) -> None:
        """One forward of the draft."""
        draft = self.draft
        if not (draft.is_prefilled and draft.can_run):
            return
        before = list(draft.sequence.tokens)
        (proposal,) = self.proposer.propose([(draft, draft.forced())])
        self._send(proposal, before)

    def _send(self, proposal: Proposal, before: list[int]) -> None:
        draft = self.draft
        assert proposal.start == len(before)
        assert draft.sequence.tokens == [*before, *proposal.ids]
        chances = self.said.chances.setdefault(proposal.epoch, [])
        chances += proposal.confidences
        ahead = draft.sequence.num_ahead
        num_doubted = ahead - sum(confidence == 1.0 for confidence in chances[-ahead:])
        assert num_doubted <= self.heard_lead, "farther ahead than it may"
        assert ahead <= MAX_AHEAD
        assert len(draft.sequence.tokens) <= self.scene.max_tokens
        assert draft.sequence.tokens[:-1] == self._before_end(draft.sequence.tokens[:-1]), "beyond its answer's end"
        chain = self.said.chains.setdefault(proposal.epoch, before)
        assert before == chain, "an epoch and a start name one prefix"
        self.said.chains[proposal.epoch] = [*before, *proposal.ids]
        self.proposals.append(proposal)

    def straggle(self) -> None:
        """Proposals of the newest epoch overtake all earlier ones."""
        newest = max((each.epoch for each in self.proposals), default=0)
        self.proposals = deque(sorted(self.proposals, key=lambda each: each.epoch != newest))

    def proposals_arrive(self, most: int = ALL) -> None:
        for _ in range(min(most, len(self.proposals))):
            self.wire.arrived.append(self.proposals.popleft())
        for proposal, _ in self.link.receive():
            assert isinstance(proposal, Proposal)
            if proposal.request_id == self.name and not self.has_ended:
                self.target.take(proposal)
                self.said.taken.append(proposal)

    def verdicts_arrive(self, most: int = ALL) -> None:
        for _ in range(min(most, len(self.wire.sent))):
            message = self.wire.sent.popleft()
            if isinstance(message, Verdict) and message.request_id == self.name:
                self.draft.handle(message)
                self.heard_lead = message.max_lead
                end = message.start + len(message.ids)
                assert self.draft.sequence.num_committed == end
                assert self.draft.sequence.tokens[:end] == self.text[:end]

    def read(self, num_rows: int = CACHE_ROWS) -> None:
        """The draft prefills a part of its view of the prompt."""
        draft = self.draft
        if not draft.is_prefilled:
            left = draft.prompt.num_tokens - draft.cache.length
            logits = self.draft_model.prefill(draft.prompt, draft.cache, min(num_rows, left))
            if logits is not None and draft.may_begin:
                self._send(self.proposer.begin(draft, logits), [])

    def relevance_arrives(self, cell: int) -> None:
        values = np.zeros(CELLS, np.float16)
        values[cell] = 1
        self.draft.handle(
            CellScores(request_id=self.name, grid_checksum=grid_checksum(prompt()), values=values)
        )  # fmt: skip

    def refresh_view(self) -> None:
        """The draft has time to build a new view from the target's attention scores."""
        if self.draft.is_prefilled:
            self.draft.refresh_view()

    def draft_restarts(self) -> None:
        """A new draft without state replaces the old one; messages in transit are lost."""
        chain = self.target.speculation.chain
        num_rollbacks, num_wasted = chain.num_rollbacks, chain.num_wasted + len(chain.pending)
        self._connect()
        self.target.speculation.drop()
        assert (chain.num_rollbacks, chain.num_wasted) == (num_rollbacks, num_wasted), "it forgot them"
        self.said.num_wasted_before = num_wasted
        self._start_draft()
        if self.first is None and not self.has_ended:
            self._tell()

    def target_restarts(self, num_lost: int = 0) -> None:
        """A new target continues from the tokens clients have seen; the old one's last tokens may be lost."""
        if self.has_ended:
            return
        self._connect()
        self._start_target(self.committed[: max(0, len(self.committed) - num_lost)])
        self.draft.restart()
        self.heard_lead = 0
        if self.first is None:
            self._tell()

    def _connect(self) -> None:
        self.wire = Wire()
        self.link.connect(cast("Channel", self.wire))
        self.proposals = deque[Proposal]()
        self.said = Said()

    def _start_target(self, known: list[int]) -> None:
        """Prefill the prompt, and the rows of `known` tokens if there are any, as the target's loop does."""
        self.target = TargetRequest(
            asked=request_of(self.name),
            prompt=prompt(),
            cache=new_cache(),
            sampler=self.scene.sampler(),
            speculation=SpeculationState(mode=SpeculationMode.PARALLEL, acceptance=0.8),
            stop_ids=self.scene.stop_ids,
            max_tokens=self.scene.max_tokens,
            grammar=self.certainty,
        )
        running = self.target
        logits = self.target_model.prefill(prompt(), running.cache, prompt().num_tokens)
        assert logits is not None
        self.first = None if known else logits  # after the prompt; None once the first token is chosen
        running.commit(known)
        if known[:-1]:
            rows = StepRows(cache=running.cache, ids=known[:-1], position=prompt().next_position)
            self.target_model.step([rows])

    def _start_draft(self) -> None:
        view = PrunedView(prompt(), Strategy(name="pointed at", select=pointed_at), 0.9, 0)
        self.draft = DraftRequest(
            asked=request_of(self.name),
            view=view,
            cache=new_cache(),
            sampler=self.scene.sampler(),
            grammar=self.certainty,
            max_tokens=self.scene.max_tokens,
            stop_ids=self.scene.stop_ids,
        )
        self.proposer = Proposer(cast("VideoLM", self.draft_model))
        self.heard_lead = 0

    def _tell(self) -> None:
        """The target plans and sends the draft the tokens that it does not know yet, each once and in order."""
        if self.has_ended:
            return
        self.target.speculation.plan = self.plan
        self.target.speculation.least_likely = self.least_likely
        self.link.send_verdict(self.target)
        verdict = self.wire.sent[-1]
        assert isinstance(verdict, Verdict)
        assert (verdict.start, verdict.ids) == (self.said.told, tuple(self.committed[self.said.told :]))
        assert verdict.max_lead == self.plan.max_lead
        self.said.told = len(self.committed)

    def check(self) -> None:
        """Check what must always hold for text and caches, row by row."""
        assert self.committed == self.text[: len(self.committed)]
        assert self.has_ended == (len(self.committed) == len(self.text))
        wanted = prompt_rows(prompt()) + answer_rows(self.committed[:-1], prompt().next_position)
        assert rows_of(self.target.cache) == wanted
        if not self.has_ended:
            num_taken = sum(len(proposal.ids) for proposal in self.said.taken)
            still, _ = self.said.still_holds(self.committed)
            num_wasted = self.target.speculation.chain.num_wasted + self.said.num_wasted_told
            num_wasted -= self.said.num_wasted_before
            assert num_taken == self.said.num_judged + len(still) + num_wasted
        draft, seen = self.draft, self.draft.prompt
        known = prompt_rows(seen) + answer_rows(draft.sequence.tokens, seen.next_position)
        held = rows_of(draft.cache)
        assert held == known[: len(held)]
        assert draft.is_prefilled == (len(held) >= seen.num_tokens)
        if draft.is_prefilled:
            assert draft.missing == draft.sequence.tokens[len(held) - seen.num_tokens :]

    def a_fair_round(self) -> None:
        """Every event happens once, each before the event that depends on it."""
        self.verdicts_arrive()
        self.read()
        while self.draft.can_run:
            self.propose()
        self.proposals_arrive()
        self.verify()
        self.check()


PLANS = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 24)).map(
    lambda drawn: Plan(
        min_draft_tokens=min(drawn[0], drawn[1]),
        max_draft_tokens=drawn[1],
        max_lead=drawn[1] + drawn[2] if drawn[1] else 0,
        speedup=1.5,
    )
)
SCENES = st.builds(
    Scene,
    agreement=st.sampled_from((0, 5, 8, 9, 9, 10)),
    vocabulary=st.sampled_from((2, 3, 8, 30)),
    salt=st.integers(0, 1000),
    temperature=st.sampled_from((0.0, 0.0, 0.7)),
    is_penalised=st.booleans(),
    forced_every=st.sampled_from((0, 0, 4, 9)),
    max_tokens=st.sampled_from((1, 7, 40, 70, 70)),
    stop_ids=st.sampled_from((frozenset[int](), frozenset[int](), frozenset({1}))),
)
WIDE = Plan(min_draft_tokens=4, max_draft_tokens=8, max_lead=16, speedup=2.0)
FEW = st.integers(1, 4) | st.just(ALL)


class Protocol(RuleBasedStateMachine):
    """Any schedule; at its end the disturbances stop and the draft is always right, so that the pair must recover."""

    @initialize(scene=SCENES, plan=PLANS)
    def begin(self, scene: Scene, plan: Plan) -> None:
        self.world = World(scene, plan)

    @rule(most=FEW)
    def verdicts_arrive(self, most: int) -> None:
        self.world.verdicts_arrive(most)

    @rule(most=FEW)
    def proposals_arrive(self, most: int) -> None:
        self.world.proposals_arrive(most)

    @rule(num_times=st.integers(1, 8))
    def propose(self, num_times: int) -> None:
        for _ in range(num_times):
            self.world.propose()
            self.world.check()

    @rule(num_rows=st.sampled_from((1, 7, CACHE_ROWS, CACHE_ROWS)))
    def read(self, num_rows: int) -> None:
        self.world.read(num_rows)

    @rule()
    def verify(self) -> None:
        self.world.verify()

    @rule(num_times=st.integers(1, 3))
    def everything_in_order(self, num_times: int) -> None:
        for _ in range(num_times):
            self.world.a_fair_round()

    @rule(plan=PLANS, least=st.sampled_from((0.0, 0.0, 0.3, 0.9)))
    def plan(self, plan: Plan, least: float) -> None:
        self.world.plan, self.world.least_likely = plan, least

    @rule(num_times=st.integers(1, 5))
    def straggle(self, num_times: int) -> None:
        """A correction arrives while the draft's proposals are in transit; proposals made after it arrive first."""
        self.world.verdicts_arrive()
        self.world.read()
        self.propose(4)
        self.world.verify()
        self.world.verdicts_arrive()
        self.propose(num_times)
        self.world.straggle()
        self.world.proposals_arrive()
        self.world.verify()

    @rule(num_times=st.integers(2, 6), most=st.integers(1, 4))
    def come_late(self, num_times: int, most: int) -> None:
        """Some proposals arrive after the target has judged the earlier ones."""
        self.world.verdicts_arrive()
        self.world.read()
        self.propose(num_times)
        self.world.proposals_arrive(most)
        self.world.verify()
        self.world.check()
        self.world.proposals_arrive()
        self.world.verify()

    @rule(cell=st.integers(0, CELLS - 1))
    def relevance_arrives(self, cell: int) -> None:
        self.world.relevance_arrives(cell)

    @rule()
    def refresh_view(self) -> None:
        self.world.refresh_view()

    @rule()
    def draft_restarts(self) -> None:
        self.world.draft_restarts()

    @rule(num_lost=st.integers(0, 9))
    def target_restarts(self, num_lost: int) -> None:
        self.world.target_restarts(num_lost)

    @rule()
    def cancel(self) -> None:
        self.world.cancel()

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.draft_model.agreement, world.plan, world.least_likely = 10, WIDE, 0.0
        if world.has_ended:
            world.cancel()
        world.num_lonely = 0
        for _ in range(world.scene.max_tokens):
            world.a_fair_round()
        assert world.has_ended
        assert world.num_lonely <= MOST_LONELY, "the draft does not get back on its feet"


MOST_LONELY = 3  # an outdated plan; a proposal that is wrong at once; another such proposal in transit
TestProtocol = Protocol.TestCase
UNSHRUNK = [phase for phase in Phase if phase is not Phase.shrink]  # shrinking would take minutes
TestProtocol.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, phases=UNSHRUNK)


EVENTS = {
    "read": World.read,
    "propose": World.propose,
    "proposals arrive": World.proposals_arrive,
    "verdicts arrive": World.verdicts_arrive,
    "verify": World.verify,
}


@given(scene=SCENES, plan=PLANS, order=st.permutations(sorted(EVENTS)))
@settings(deadline=None, max_examples=40, phases=UNSHRUNK)
def test_a_fair_schedule_in_any_order_ends_after_at_most_a_verification_for_each_token(
    scene: Scene, plan: Plan, order: list[str]
) -> None:
    world = World(scene, plan)
    for _ in range(scene.max_tokens):
        for event in order:
            EVENTS[event](world)
            world.check()
    assert world.has_ended


@given(most=st.integers(1, 12), lead=st.integers(0, 12), max_tokens=st.integers(2, 60), salt=st.integers(0, 1000))
@settings(deadline=None, max_examples=40, phases=UNSHRUNK)
def test_a_perfect_draft_fills_every_verification_and_wastes_nothing(
    most: int, lead: int, max_tokens: int, salt: int
) -> None:
    scene = Scene(max_tokens=max_tokens, salt=salt)
    world = World(scene, Plan(min_draft_tokens=1, max_draft_tokens=most, max_lead=most + lead, speedup=2.0))
    while not world.has_ended:
        world.a_fair_round()
    assert world.num_verifications == ceil((max_tokens - 1) / (most + 1))
    assert (world.said.num_wasted_told, world.said.num_rollbacks_told) == (0, 0)


def test_a_stale_proposal_is_dropped_after_a_newer_epoch() -> None:
    chain = ProposalChain()
    chain.extend(1, 1, [5], [1.0], [0])
    chain.extend(0, 2, [9], [1.0], [0])
    assert chain.pending == [5]
    assert chain.num_wasted == 1


def test_a_contradicted_chain_is_void_until_the_draft_opens_a_new_epoch() -> None:
    chain = ProposalChain()
    chain.extend(0, 1, [5, 6, 7], [1.0, 1.0, 1.0], [0])
    chain.settle([0, 5, 8])
    assert chain.pending == []
    chain.extend(0, 4, [1], [1.0], [0, 5, 8])
    assert chain.pending == []
    chain.extend(1, 3, [2], [1.0], [0, 5, 8])
    assert chain.pending == [2]


def test_a_gap_in_an_epoch_is_refused() -> None:
    chain = ProposalChain()
    chain.extend(0, 1, [5], [1.0], [0])
    chain.extend(0, 3, [7], [1.0], [0])
    assert chain.pending == [5]


def test_a_verdict_that_confirms_the_chain_keeps_the_cache_and_the_epoch() -> None:
    draft = DraftSequence()
    draft.learn(0, [1])
    draft.propose([2, 3, 4])
    epoch = draft.epoch
    assert draft.learn(1, [2, 3]) == 4, "the token beyond the verdict stands, too"
    assert (draft.epoch, draft.num_ahead) == (epoch, 1)


def test_a_correction_truncates_to_the_common_prefix() -> None:
    draft = DraftSequence()
    draft.learn(0, [1])
    draft.propose([2, 3, 4])
    assert draft.learn(1, [2, 9]) == 2
    assert draft.tokens == [1, 2, 9]
    assert draft.num_ahead == 0


def test_a_verdict_from_beyond_what_is_known_is_refused() -> None:
    draft = DraftSequence()
    draft.learn(0, [1])
    with pytest.raises(ValueError, match="only 1 tokens are known"):
        draft.learn(2, [3])
