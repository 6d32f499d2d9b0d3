"""Both ends of the proposal protocol for one request, as pure state: what is proposed and can still be accepted.

The draft owns the epoch, which rises whenever the draft's chain is replaced by the target's tokens. A proposal names
the prefix it extends as (epoch, start): the committed tokens the draft knew when the epoch began, then its own
chain up to output position `start`. The target never needs to ask back: a proposal that contradicts what is
committed voids its whole epoch, and everything of that epoch still in flight is dropped on arrival.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

CERTAIN = 1.0  # the confidence of a token that a grammar forces


def num_before_end(ids: Sequence[int], stop_ids: Container[int]) -> int:
    """How many tokens come before the first one that ends the answer."""
    return next((place for place, token in enumerate(ids) if token in stop_ids), len(ids))


def num_equal(proposed: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    pairs = enumerate(zip(proposed, chosen, strict=False))
    return next((place for place, (token, own) in pairs if token != own), min(len(proposed), len(chosen)))


class ProposalChain:
    """Target side: proposals beyond the committed tokens that may still come true."""

    def __init__(self) -> None:
        self.pending: list[int] = []  # for the positions after the committed tokens
        self._confidences: list[float] = []
        self.num_wasted = 0  # proposed tokens that were never judged, since the last `take_losses`
        self.num_rollbacks = 0  # chains voided by a contradiction, since then
        self.forget()

    def forget(self) -> None:
        """Drop all proposals and accept any epoch next: a new draft worker starts counting from 0 again."""
        self._epoch = -1
        self._start = 0  # output position of pending[0]
        self._drop()

    def extend(
        self, epoch: int, start: int, ids: Sequence[int], confidences: Sequence[float], committed: Sequence[int]
    ) -> None:
        """Take a proposal; stale and contradicted ones are dropped."""
        if epoch > self._epoch:  # nothing is pending: the committed tokens contradict or pass all of the last epoch
            self._epoch, self._start, self._is_void = epoch, start, False
        if epoch < self._epoch or self._is_void or start != self._start + len(self.pending):
            self.num_wasted += len(ids)
            return
        self.num_wasted += min(max(len(committed) - start, 0), len(ids))  # late: the target has passed them
        self.pending += ids
        self._confidences += confidences
        self.settle(committed)

    def settle(self, committed: Sequence[int]) -> None:
        """Compare with the committed tokens: the part that they reach is removed, a contradiction voids the rest."""
        overlap = min(len(committed) - self._start, len(self.pending))
        came_true = self.pending[:overlap] == list(committed[self._start : self._start + overlap])
        del self.pending[:overlap], self._confidences[:overlap]
        self._start += overlap
        if not came_true:  # nothing of this epoch can hold any more
            self.num_rollbacks += 1
            self._drop()

    def _drop(self) -> None:
        self.num_wasted += len(self.pending)
        self.pending, self._confidences, self._is_void = [], [], True

    def take_losses(self) -> tuple[int, int]:
        """Rollbacks and wasted tokens since the last call."""
        losses = self.num_rollbacks, self.num_wasted
        self.num_rollbacks = self.num_wasted = 0
        return losses

    def num_worth(self, least: float, most: int) -> int:
        """Leading proposals that all come true with a probability of at least `least`, as the draft sees it.

        At most `most` of them are uncertain; certain ones are not limited, since they cost a row each but no risk.
        """
        probability, num_uncertain = 1.0, 0
        for number, confidence in enumerate(self._confidences):
            probability *= confidence
            num_uncertain += confidence < CERTAIN
            if probability < least or num_uncertain > most:
                return number
        return len(self._confidences)

    def num_uncertain(self, count: int) -> int:
        """How many of the first `count` proposals are uncertain."""
        return sum(confidence < CERTAIN for confidence in self._confidences[:count])


class DraftSequence:
    """Draft side: the committed tokens that the draft knows, then its own chain."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_committed = 0
        self.epoch = 0
        self._certain: set[int] = set()  # positions of certain tokens, beyond the committed ones

    @property
    def num_ahead(self) -> int:
        """Length of the chain beyond the committed tokens."""
        return len(self.tokens) - self.num_committed

    @property
    def num_uncertain(self) -> int:
        """Tokens of the chain that may be wrong."""
        return self.num_ahead - len(self._certain)

    def propose(self, tokens: Sequence[int], *, are_certain: bool = False) -> tuple[int, int]:
        """Append the draft's own tokens; returns the (epoch, start) that name their prefix."""
        start = len(self.tokens)
        self.tokens += tokens
        if are_certain:
            self._certain |= set(range(start, len(self.tokens)))
        return self.epoch, start

    def learn(self, start: int, ids: Sequence[int]) -> int:
        """Take a verdict: the target committed `ids` from output position `start` on.

        Returns how many of the old tokens still stand: all of them if the chain agrees, with its part beyond the
        verdict. The KV cache must be cut to them. A mismatch, or a target that is ahead, replaces the chain and opens a
        new epoch.
        """
        if start > self.num_committed:
            raise ValueError(f"verdict from position {start}, but only {self.num_committed} tokens are known")
        standing, end = start + num_equal(ids, self.tokens[start:]), start + len(ids)
        if standing < end:
            self.tokens[standing:] = ids[standing - start :]
            self.epoch += 1
        else:
            standing = len(self.tokens)
        self.num_committed = end
        self._certain = {place for place in self._certain if end <= place < len(self.tokens)}
        return standing
