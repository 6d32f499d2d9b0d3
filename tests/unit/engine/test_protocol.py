"""The proposal protocol under random schedules: whatever happens, the committed text is the target's own."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.token_sampling import Guess
from vidspec_service.engine.proposals import DraftSequence, ProposalChain

LENGTH = 40
VOCABULARY = 3


def guessed(*tokens: int) -> list[Guess]:
    return [Guess(token, (token + 1) % VOCABULARY, 0.8) for token in tokens]


def target_token(prefix: list[int]) -> int:
    """A stand-in for the target: any deterministic function of the prefix."""
    return hash(tuple(prefix)) % VOCABULARY


@dataclass
class World:
    """Draft, target and the two directions of their channel, moved one event at a time."""

    agreement: int  # out of 10: how often the draft's guess is the target's token
    committed: list[int] = field(default_factory=lambda: [target_token([])])
    num_told: int = 0
    chain: ProposalChain = field(default_factory=ProposalChain)
    draft: DraftSequence = field(default_factory=DraftSequence)
    proposals: deque[tuple[bool, int, int, list[int]]] = field(default_factory=deque)
    verdicts: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def draft_steps(self) -> None:
        if not self.draft.tokens or self.draft.num_ahead >= 8:
            return
        epoch, start, said = self.draft.propose(guessed(self.drafted(self.draft.tokens)))
        self.proposals.append((False, epoch, start, [guess.token for guess in said]))

    def drafted(self, prefix: list[int]) -> int:
        right = target_token(prefix)
        return right if hash((7, *prefix)) % 10 < self.agreement else (right + 1) % VOCABULARY

    def draft_wanders(self) -> None:
        if (doubt := self.draft.doubt()) is None:
            return
        at = doubt.at
        tokens = [*self.draft.tokens[:at], doubt.guess.runner_up]
        for _ in range(2):
            tokens.append(self.drafted(tokens))
        self.draft.remember(at, guessed(*tokens[at:]))
        self.proposals.append((True, self.draft.epoch, at, tokens[at:]))

    def proposal_arrives(self) -> None:
        if self.proposals:
            is_alternative, epoch, start, ids = self.proposals.popleft()
            take = self.chain.branch if is_alternative else self.chain.extend
            take(epoch, start, ids, [1.0] * len(ids), self.committed)

    def verdict_arrives(self) -> None:
        if self.verdicts:
            start, ids = self.verdicts.popleft()
            standing = self.draft.learn(start, ids)
            assert self.draft.tokens[:standing] == self.committed[:standing] or standing > len(self.committed)

    def target_verifies(self, window: int = 5) -> None:
        if len(self.committed) >= LENGTH:
            return
        pending = self.chain.pending(len(self.committed))[:window]
        prefix = list(self.committed)
        for proposed in [*pending, None]:
            token = target_token(prefix)
            prefix.append(token)
            if token != proposed:
                break
        self.committed = prefix
        self.chain.settle(self.committed)
        self.tell()

    def tell(self) -> None:
        self.verdicts.append((self.num_told, self.committed[self.num_told :]))
        self.num_told = len(self.committed)

    def draft_restarts(self) -> None:
        self.draft, self.chain, self.num_told = DraftSequence(), ProposalChain(), 0
        self.proposals.clear()
        self.verdicts.clear()
        self.tell()

    def target_restarts(self) -> None:
        """A new target knows the committed tokens; the draft forgets its chain when it meets it."""
        self.draft_restarts()


EVENTS = ("draft_steps", "draft_wanders", "proposal_arrives", "verdict_arrives", "target_verifies")


@given(
    agreement=st.integers(0, 10),
    events=st.lists(st.sampled_from((*EVENTS, *EVENTS, *EVENTS, "draft_restarts", "target_restarts")), max_size=300),
)
def test_any_schedule_commits_the_targets_own_tokens(agreement: int, events: list[str]) -> None:
    world = World(agreement)
    for event in events:
        getattr(world, event)()
    reference: list[int] = []
    while len(reference) < len(world.committed):
        reference.append(target_token(reference))
    assert world.committed == reference


@given(order=st.permutations(EVENTS))
def test_a_fair_schedule_always_finishes(order: list[str]) -> None:
    world = World(agreement=5)
    for _ in range(2 * LENGTH):
        for event in order:
            getattr(world, event)()
    assert len(world.committed) >= LENGTH


@given(agreement=st.just(10), window=st.integers(1, 8))
def test_a_perfect_draft_wastes_nothing(agreement: int, window: int) -> None:
    world = World(agreement)
    world.tell()
    for _ in range(LENGTH):
        world.verdict_arrives()
        for _ in range(window):
            world.draft_steps()
            world.proposal_arrives()
        world.target_verifies(window)
    assert world.chain.num_wasted == 0


def test_a_stale_proposal_is_dropped_after_a_newer_epoch() -> None:
    chain = ProposalChain()
    chain.extend(1, 1, [5], [1.0], [0])
    chain.extend(0, 2, [9], [1.0], [0])
    assert chain.pending(1) == [5]
    assert chain.num_wasted == 1


def test_a_contradicted_chain_is_void_until_the_draft_opens_a_new_epoch() -> None:
    chain = ProposalChain()
    chain.extend(0, 1, [5, 6, 7], [1.0, 1.0, 1.0], [0])
    chain.settle([0, 5, 8])
    assert chain.pending(3) == []
    chain.extend(0, 4, [1], [1.0], [0, 5, 8])
    assert chain.pending(3) == []
    chain.extend(1, 3, [2], [1.0], [0, 5, 8])
    assert chain.pending(3) == [2]


def test_a_gap_in_an_epoch_is_refused() -> None:
    chain = ProposalChain()
    chain.extend(0, 1, [5], [1.0], [0])
    chain.extend(0, 3, [7], [1.0], [0])
    assert chain.pending(1) == [5]


def test_a_verdict_that_confirms_the_chain_keeps_the_cache_and_the_epoch() -> None:
    draft = DraftSequence()
    draft.learn(0, [1])
    for token in (2, 3, 4):
        draft.propose(guessed(token))
    epoch = draft.epoch
    assert draft.learn(1, [2, 3]) == 3
    assert (draft.epoch, draft.num_ahead) == (epoch, 1)


def test_a_correction_truncates_to_the_common_prefix() -> None:
    draft = DraftSequence()
    draft.learn(0, [1])
    for token in (2, 3, 4):
        draft.propose(guessed(token))
    assert draft.learn(1, [2, 9]) == 2
    assert draft.tokens == [1, 2, 9]
    assert draft.num_ahead == 0


def test_an_alternative_that_has_what_was_committed_takes_the_chains_place() -> None:
    chain = ProposalChain()
    chain.extend(0, 1, [5, 6, 7], [0.9] * 3, [0])
    chain.branch(0, 2, [8, 9, 1], [1.0, 0.8, 0.7], [0])
    assert chain.pending(1) == [5, 6, 7]
    chain.settle([0, 5, 8])
    assert chain.pending(3) == [9, 1]
    assert chain.num_likely(0.6) == 1
    assert (chain.num_rollbacks, chain.num_wasted) == (1, 1)  # 6 was judged, 7 was not


def test_an_alternative_may_come_after_the_contradiction() -> None:
    chain = ProposalChain()
    chain.extend(0, 1, [5, 6, 7], [0.9] * 3, [0])
    chain.settle([0, 5, 8])
    chain.branch(0, 1, [8, 9], [1.0, 0.9], [0, 5, 8])  # to a token that came true
    chain.branch(0, 2, [4, 9], [1.0, 0.9], [0, 5, 8])  # to the right one, but not with what was committed
    assert chain.pending(3) == []
    chain.branch(0, 2, [8, 9], [1.0, 0.9], [0, 5, 8])
    assert chain.pending(3) == [9]
    assert chain.num_wasted == 1 + 2 + 2


def test_alternatives_to_what_came_true_are_wasted() -> None:
    chain = ProposalChain()
    chain.extend(0, 1, [5, 6], [0.9] * 2, [0])
    chain.branch(0, 1, [8, 9, 9], [1.0] * 3, [0])
    chain.settle([0, 5])
    assert (chain.pending(2), chain.num_wasted) == ([6], 3)
    chain.settle([0, 5, 4])
    assert chain.pending(3) == []


def test_the_draft_goes_on_from_the_alternative_and_says_it_once_more_in_a_new_epoch() -> None:
    draft, chain = DraftSequence(), ProposalChain()
    draft.learn(0, [1])
    chain.extend(0, 1, [2, 0, 2], [0.8] * 3, [1])
    draft.propose(guessed(2, 0, 2))
    draft.remember(2, guessed(1, 1, 2))
    chain.branch(0, 2, [1, 1, 2], [0.8] * 3, [1])
    chain.settle([1, 2, 1])
    assert draft.learn(1, [2, 1]) == 2
    assert draft.tokens == [1, 2, 1, 1, 2]
    assert (draft.num_ahead, draft.epoch) == (2, 2)
    epoch, start, said = draft.propose(guessed(0))
    assert (epoch, start, [guess.token for guess in said]) == (2, 3, [1, 2, 0])
    wasted = chain.num_wasted
    chain.extend(epoch, start, [guess.token for guess in said], [0.8] * 3, [1, 2, 1])
    assert chain.pending(3) == [1, 2, 0]
    assert chain.num_wasted == wasted


def test_an_alternative_begins_no_epoch() -> None:
    chain = ProposalChain()  # of a request that was paused: the draft has gone on meanwhile
    chain.branch(3, 5, [8, 9], [1.0, 0.9], [0, 1])
    chain.extend(3, 2, [6, 7], [0.9, 0.9], [0, 1])
    assert chain.pending(2) == [6, 7]


def test_the_likeliest_break_is_asked_about_first_and_each_only_once() -> None:
    draft = DraftSequence()
    draft.learn(0, [1])
    draft.propose([Guess(2, 0, 0.9), Guess(0, 1, 0.6), Guess(2, 1, 0.5), Guess(1, 0, 0.99)])
    first = draft.doubt()
    assert first is not None
    assert first.probability == pytest.approx(0.9 * 0.4)
    assert first.standing == pytest.approx(0.9 * 0.6 * 0.5 * 0.99)
    places = []
    while (doubt := draft.doubt()) is not None:
        places.append(doubt.at)
        draft.remember(doubt.at, guessed(0, 1))
    assert places == [2, 3, 1]
