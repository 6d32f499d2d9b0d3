"""Both ends of the proposal protocol for one request, as pure state: what is proposed, what still can hold.

The draft owns the epoch: it rises whenever the draft's chain is replaced by the target's tokens. A proposal names
the prefix it extends as (epoch, start): the committed tokens the draft knew when the epoch began, then its own
chain up to output position `start`. The target never needs to ask back: a proposal that contradicts what is
committed voids its whole epoch, and everything of that epoch still in flight is dropped on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence


class ProposalChain:
    """Target side: proposals beyond the committed tokens that may still come true."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._confidences: list[float] = []
        self.num_wasted = 0  # proposed tokens that were never judged
        self.num_rollbacks = 0
        self.forget()

    def forget(self) -> None:
        """Whatever was proposed is void, and the next epoch may be any: another draft counts anew."""
        self._epoch = -1
        self._start = 0  # output position of _ids[0]
        self._drop()

    def extend(
        self, epoch: int, start: int, ids: Sequence[int], confidences: Sequence[float], committed: Sequence[int]
    ) -> None:
        """Take a proposal; stale and contradicted ones are dropped."""
        if epoch > self._epoch:
            self.num_wasted += len(self._ids)
            self._epoch, self._start, self._is_void = epoch, start, False
            self._ids, self._confidences = [], []
        if epoch < self._epoch or self._is_void or start != self._start + len(self._ids):
            self.num_wasted += len(ids)
            return
        self.num_wasted += min(max(len(committed) - start, 0), len(ids))  # late: the target has gone past them
        self._ids += ids
        self._confidences += confidences
        self.settle(committed)

    def settle(self, committed: Sequence[int]) -> None:
        """Compare with what is committed by now: the part that was reached leaves, a contradiction voids the rest."""
        overlap = min(len(committed) - self._start, len(self._ids))
        if overlap <= 0:
            return
        came_true = self._ids[:overlap] == list(committed[self._start : self._start + overlap])
        del self._ids[:overlap], self._confidences[:overlap]
        self._start += overlap
        if not came_true:
            self.void()

    def void(self) -> None:
        """Nothing of this epoch can hold any more."""
        self.num_rollbacks += 1
        self._drop()

    def _drop(self) -> None:
        self.num_wasted += len(self._ids)
        self._ids, self._confidences, self._is_void = [], [], True

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


class DraftSequence:
    """Draft side: the committed tokens it has been told of, then its own chain."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_committed = 0
        self.epoch = 0

    @property
    def num_ahead(self) -> int:
        """Length of the chain beyond the committed tokens."""
        return len(self.tokens) - self.num_committed

    def propose(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Append own tokens; returns the (epoch, start) that name their prefix."""
        start = len(self.tokens)
        self.tokens += tokens
        return self.epoch, start

    def learn(self, start: int, ids: Sequence[int]) -> int:
        """Take a verdict: the target committed `ids` from output position `start` on.

        Returns how many of the old tokens still stand; the KV cache must be cut to them. A mismatch, or a
        target that is ahead, replaces the chain and opens a new epoch.
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
            self.tokens[standing:] = ids[standing - start :]
            self.epoch += 1
        self.num_committed = end
        return standing
