"""The proposal protocol's two ends, without models or channels: what the draft has said, and what of it may hold.

A proposal names the prefix it extends as (epoch, start): the committed tokens the draft knew when the epoch began,
then its own chain up to output position `start`. It goes on with the chain from there, or it is an alternative to what
the chain has there. The target never needs to ask back: a proposal that contradicts what is
committed voids the rest of its epoch, unless an alternative begins with what was committed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vidspec_models.token_sampling import Guess

_LEAST_DOUBT = 0.03  # an alternative is worth idle time if it comes to be used in one case of thirty


class ProposalChain:
    """Target side: proposals beyond the committed tokens that may still come true."""

    def __init__(self) -> None:
        self._epoch = -1
        self._start = 0  # output position of _ids[0]
        self._ids: list[int] = []
        self._confidences: list[float] = []
        self._is_open = False  # the epoch's own chain may go on; else it was contradicted at _broken_at
        self._broken_at = 0
        self._alternatives: dict[int, tuple[Sequence[int], Sequence[float]]] = {}  # by output position
        self.num_wasted = 0  # proposed tokens that were never judged
        self.num_rollbacks = 0

    def extend(
        self, epoch: int, start: int, ids: Sequence[int], confidences: Sequence[float], committed: Sequence[int]
    ) -> None:
        """Take what the chain goes on with; what is stale or contradicted is dropped."""
        if epoch > self._epoch:
            self._begin(epoch, start, ids)
        if epoch < self._epoch or not self._is_open or start != self._start + len(self._ids):
            self.num_wasted += len(ids)
            return
        self._ids += ids
        self._confidences += confidences
        self.settle(committed)

    def branch(
        self, epoch: int, start: int, ids: Sequence[int], confidences: Sequence[float], committed: Sequence[int]
    ) -> None:
        """Take an alternative to what the chain has at `start`: for later, or at once if that was contradicted."""
        if epoch == self._epoch and self._is_open and self._start <= start < self._start + len(self._ids):
            self._alternatives[start] = (ids, confidences)
        elif epoch == self._epoch and not self._is_open and start == self._broken_at:
            self._adopt(ids, confidences, committed)
        else:
            self.num_wasted += len(ids)

    def settle(self, committed: Sequence[int]) -> None:
        """Compare with what is committed by now: the part that came true leaves, a contradiction ends the chain."""
        overlap = min(len(committed) - self._start, len(self._ids))
        if overlap <= 0:
            return
        pairs = zip(self._ids, committed[self._start : self._start + overlap], strict=False)
        standing = next((i for i, (proposed, token) in enumerate(pairs) if proposed != token), overlap)
        self._start += standing
        for at in [at for at in self._alternatives if at < self._start]:
            self.num_wasted += len(self._alternatives.pop(at)[0])
        if standing < overlap:
            self._break(len(self._ids) - standing - 1, committed)
            return
        del self._ids[:overlap], self._confidences[:overlap]

    @property
    def is_adopted(self) -> bool:
        """It is an alternative: what follows comes when the draft has heard of it."""
        return bool(self._ids) and not self._is_open

    def pending(self, num_committed: int) -> list[int]:
        """Proposals for the positions from `num_committed` on; empty while the draft is behind."""
        return self._ids if self._start == num_committed else []

    def num_likely(self, least: float) -> int:
        """Leading proposals that all come true with a probability of at least `least`, as the draft sees it."""
        probability = 1.0
        for number, confidence in enumerate(self._confidences):
            probability *= confidence
            if probability < least:
                return number
        return len(self._confidences)

    def _begin(self, epoch: int, start: int, ids: Sequence[int]) -> None:
        """A new epoch. The draft says once more what it knows to be adopted: that is no waste."""
        first = self._start - start
        if first < 0 or list(ids[first : first + len(self._ids)]) != self._ids:
            self.num_wasted += len(self._ids)
        self._drop_alternatives()
        self._epoch, self._start, self._is_open = epoch, start, True
        self._ids, self._confidences = [], []

    def _break(self, num_unjudged: int, committed: Sequence[int]) -> None:
        """What is committed at _start is not what the chain has there."""
        self.num_rollbacks += 1
        self.num_wasted += num_unjudged
        alternative = self._alternatives.pop(self._start, None)
        self._drop_alternatives()
        self._ids, self._confidences, self._is_open, self._broken_at = [], [], False, self._start
        if alternative is not None:
            self._adopt(*alternative, committed)

    def _adopt(self, ids: Sequence[int], confidences: Sequence[float], committed: Sequence[int]) -> None:
        """Go on with an alternative to what was contradicted, if it has the token that was committed instead."""
        if self._ids or ids[0] != committed[self._broken_at]:
            self.num_wasted += len(ids)
            return
        self._start, self._ids, self._confidences = self._broken_at, list(ids), list(confidences)
        self.settle(committed)

    def _drop_alternatives(self) -> None:
        self.num_wasted += sum(len(ids) for ids, _ in self._alternatives.values())
        self._alternatives = {}


@dataclass(frozen=True, slots=True)
class Doubt:
    """The chain breaks at output position `at`, at which it has `guess`, with this probability."""

    at: int
    guess: Guess
    probability: float
    standing: float  # the probability that the whole chain comes true


class DraftSequence:
    """Draft side: the committed tokens it has been told of, then its own chain."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_committed = 0
        self.epoch = 0
        self._num_said = 0  # tokens that the target has or knows by this epoch's proposals
        self._guesses: list[Guess] = []  # the tokens beyond the committed ones
        self._alternatives: dict[int, list[Guess]] = {}  # to the chain from an output position on

    @property
    def num_ahead(self) -> int:
        """Length of the chain beyond the committed tokens."""
        return len(self.tokens) - self.num_committed

    def propose(self, guesses: Sequence[Guess]) -> tuple[int, int, list[Guess]]:
        """Append own tokens; returns all that the epoch has not said yet, and the (epoch, start) of its prefix."""
        self.tokens += [guess.token for guess in guesses]
        self._guesses += guesses
        start, self._num_said = self._num_said, len(self.tokens)
        return self.epoch, start, self._guesses[start - self.num_committed :]

    def doubt(self) -> Doubt | None:
        """Where the chain is likeliest to break, of the places without an alternative; None if nowhere likely."""
        place, likeliest, standing = None, _LEAST_DOUBT, 1.0
        for at, guess in enumerate(self._guesses, self.num_committed):
            breaking, standing = standing * (1.0 - guess.confidence), standing * guess.confidence
            if breaking > likeliest and at not in self._alternatives:
                place, likeliest = at, breaking
        return None if place is None else Doubt(place, self._guesses[place - self.num_committed], likeliest, standing)

    def remember(self, at: int, guesses: list[Guess]) -> None:
        """An alternative to the chain from output position `at` on."""
        self._alternatives[at] = guesses

    def learn(self, start: int, ids: Sequence[int]) -> int:
        """Take a verdict: the target committed `ids` from output position `start` on.

        Returns how many of the old tokens still stand; the KV cache must be cut to them. A mismatch, or a
        target that is ahead, replaces the chain, by an alternative that has those tokens if there is one, and opens a
        new epoch.
        """
        if start > self.num_committed:
            raise ValueError(f"verdict from position {start}, but only {self.num_committed} tokens are known")
        standing = start
        for token in ids:
            if standing == len(self.tokens) or self.tokens[standing] != token:
                break
            standing += 1
        end = start + len(ids)
        if standing < end:
            self._guesses = _rest(self._alternatives.get(standing, []), ids[standing - start :])
            self.tokens[standing:] = [*ids[standing - start :], *(guess.token for guess in self._guesses)]
            self._alternatives = {}
            self._num_said = end
            self.epoch += 1
        else:
            del self._guesses[: end - self.num_committed]
            self._alternatives = {at: guesses for at, guesses in self._alternatives.items() if at >= end}
            self._num_said = max(self._num_said, end)
        self.num_committed = end
        return standing


def _rest(alternative: list[Guess], ids: Sequence[int]) -> list[Guess]:
    """What it has after `ids`; nothing if it does not begin with them."""
    begins = [guess.token for guess in alternative[: len(ids)]] == list(ids)
    return alternative[len(ids) :] if begins else []
