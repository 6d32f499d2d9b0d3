"""The proposal protocol under random schedules: whatever happens, the committed text is the target's own."""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.engine.speculation.proposals import DraftSequence, ProposalChain

LENGTH = 40
VOCABULARY = 3


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
    proposals: deque[tuple[int, int, int]] = field(default_factory=deque)
    verdicts: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def draft_steps(self) -> None:
        if not self.draft.tokens or self.draft.num_ahead >= 8:
            return
        right = target_token(self.draft.tokens)
        is_right = hash((7, *self.draft.tokens)) % 10 < self.agreement
        token = right if is_right else (right + 1) % VOCABULARY
        epoch, start = self.draft.propose([token])
        self.proposals.append((epoch, start, token))

    def proposal_arrives(self) -> None:
        if self.proposals:
            epoch, start, token = self.proposals.popleft()
            self.chain.extend(epoch, start, [token], [1.0], self.committed)

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


EVENTS = ("draft_steps", "proposal_arrives", "verdict_arrives", "target_verifies")


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
        draft.propose([token])
    epoch = draft.epoch
    assert draft.learn(1, [2, 3]) == 3
    assert (draft.epoch, draft.num_ahead) == (epoch, 1)


def test_a_correction_truncates_to_the_common_prefix() -> None:
    draft = DraftSequence()
    draft.learn(0, [1])
    for token in (2, 3, 4):
        draft.propose([token])
    assert draft.learn(1, [2, 9]) == 2
    assert draft.tokens == [1, 2, 9]
    assert draft.num_ahead == 0
