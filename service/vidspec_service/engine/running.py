"""Running: everything the target holds for one request, from prefill to its last token."""

from __future__ import annotations

from dataclasses import dataclass

from vidspec_models.compression.pruner import KVPruner
from vidspec_models.inputs import Prompt
from vidspec_models.kv_cache import KVCache
from vidspec_models.preservation import TextQueries
from vidspec_models.token_sampling import CoupledSampler
from vidspec_models.video_lm import StepRows
from vidspec_service.engine.cell_scores import CellScores
from vidspec_service.engine.messages import Ended, Proposal, Tokens
from vidspec_service.engine.sequence import TargetSequence
from vidspec_service.engine.speculation import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a forward committed, and how many proposals it judged and found right."""

    committed: tuple[int, ...]
    num_proposed: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Running:
    """Between forwards the cache holds the prompt and every committed token but the last."""

    request_id: str
    prompt: Prompt
    cache: KVCache
    sequence: TargetSequence
    sampler: CoupledSampler
    speculation: Speculation
    pruner: KVPruner | None = None  # of requests that are compressed
    prepare_s: float = 0.0  # what its prompt took
    ticket: int = 0  # order of admission
    text_queries: TextQueries | None = None  # noted while the prompt is prefilled
    relevance: CellScores | None = None  # what the draft was told, or a later one will be

    @property
    def num_rows_to_resume(self) -> int:
        """Cache rows needed to decode from here on."""
        return self.prompt.num_tokens + self.num_committed + 1

    @property
    def num_committed(self) -> int:
        return len(self.sequence.committed)

    def pending(self) -> list[int]:
        """The proposals that the next forward would verify."""
        speculation = self.speculation
        most = min(speculation.plan.window, self._most_pending, speculation.chain.num_likely(speculation.least_likely))
        return speculation.chain.pending(self.num_committed)[:most] if most > 0 else []

    @property
    def _most_pending(self) -> int:
        """What one forward may verify: not beyond the answer's limit, nor beyond what one selection of rows is for."""
        most = self.sequence.num_left - 1
        return most if self.pruner is None else min(most, self.pruner.num_rows_left(self.cache.length) - 1)

    @property
    def has_enough(self) -> bool:
        """No reason to wait for the draft: it has proposed enough, or does not follow (yet, or any more)."""
        if not self.speculation.is_followed:
            return True
        chain, minimum = self.speculation.chain, min(self.speculation.plan.minimum, self._most_pending)
        num_pending = len(chain.pending(self.num_committed))
        return num_pending >= minimum or chain.num_likely(self.speculation.least_likely) < num_pending

    def take(self, proposal: Proposal) -> None:
        """A proposal has arrived."""
        self.speculation.is_followed = True
        self.speculation.draft_video_tokens = proposal.video_tokens
        self.speculation.chain.extend(
            proposal.epoch, proposal.start, proposal.ids, proposal.confidences, self.sequence.committed
        )

    def rows(self, pending: list[int]) -> StepRows:
        """The last committed token and the proposals after it."""
        return StepRows(
            cache=self.cache,
            ids=self.sequence.committed[-1:] + pending,
            position=self.prompt.next_position + self.num_committed - 1,
            pruner=self.pruner,
        )

    def judge(self, pending: list[int], chosen: list[int]) -> Judged:
        """Commit the proposals that are the target's own choice, then its next token.

        `chosen[i]` is the target's token after `pending[:i]`; the last of them judges the proposal after `pending` as
        well, if there is one. The cache is cut back to what is committed.
        """
        judged = self.speculation.chain.pending(self.num_committed)[: len(pending) + 1]
        num_accepted = 0
        while num_accepted < len(judged) and judged[num_accepted] == chosen[num_accepted]:
            num_accepted += 1
        committed = self.sequence.commit(chosen[: min(num_accepted, len(pending)) + 1])
        self.speculation.chain.settle(self.sequence.committed)
        self.cache.truncate(self.prompt.num_tokens + self.num_committed - 1)
        self.speculation.judged(num_accepted, is_rejected=num_accepted < len(judged))
        return Judged(committed=committed, num_proposed=len(judged), num_accepted=num_accepted)

    def told(self, judged: Judged) -> Tokens:
        """What the API hears of a forward."""
        return Tokens(
            request_id=self.request_id,
            ids=judged.committed,
            num_proposed=judged.num_proposed,
            num_accepted=judged.num_accepted,
            draft_video_tokens=self.speculation.draft_video_tokens,
        )

    def ended(self) -> Ended:
        """What there is to say at the end; the sequence must have one."""
        chain, reason = self.speculation.chain, self.sequence.finish_reason
        assert reason is not None
        return Ended(
            request_id=self.request_id,
            finish_reason=reason.value,
            num_rollbacks=chain.num_rollbacks,
            num_wasted=chain.num_wasted,
        )
