"""TargetRequest: everything the target holds for one request, from prefill to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from vidspec_models.compression import DyCoke
from vidspec_models.compression.dycoke import KVPruner
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.errors import ContextOverflow
from vidspec_models.grammar import GrammarMask
from vidspec_models.preservation.text_queries import TextQueries
from vidspec_models.prompt import Prompt
from vidspec_models.request import Compression, GenerationRequest, Include, SpeculationMode
from vidspec_models.sampling import CoupledSampler
from vidspec_models.video_lm import StepRows
from vidspec_service.engine.ipc.messages import Declined, Proposal, Tokens
from vidspec_service.engine.ipc.payload import TowerMemory
from vidspec_service.engine.speculation.plan import MAX_DRAFT_TOKENS, SpeculationState
from vidspec_service.engine.speculation.proposals import num_before_end, num_equal
from vidspec_service.engine.types import Activity, FinishReason, RowLogprobs


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class TargetRequest:
    """Between forwards the cache holds the prompt and every committed token but the last.

    Only the target appends to `committed`; everything a client may see is in it.
    """

    asked: GenerationRequest  # without its frames, which have been read
    prompt: Prompt
    cache: KVCache
    sampler: CoupledSampler
    speculation: SpeculationState
    stop_ids: frozenset[int]
    max_tokens: int
    next_stride: int = 2  # tokens; doubled as long as all of them can be kept
    work: list[Activity] = field(default_factory=list)  # to be sent with the next tokens, if the request asks for it
    committed: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    grammar: GrammarMask | None = None  # the sampler has it, too
    pruner: KVPruner | None = None  # for requests with DyCoke
    prepare_s: float = 0.0  # seconds that preparing the prompt took
    tower: TowerMemory | None = None  # our vision tower's output, as long as the draft may be asked to follow
    first_logits: Tensor | None = None  # [V], after the prompt, if other answers to it may copy its rows
    ticket: int = 0  # order of admission
    num_cached: int = 0  # prompt rows that were copied from other requests, until the first tokens tell it
    num_rows_waited: float = 0  # rows of its caller's other prompts prefilled while it waited; inf: preempted
    text_queries: TextQueries | None = None  # recorded while the prompt is prefilled
    relevance: NDArray[np.float16] | None = None  # [C], as sent to this draft or to a later one

    @property
    def request_id(self) -> str:
        return self.asked.request_id

    @property
    def num_rows_to_resume(self) -> int:
        """Cache rows needed to decode from here on; an answer that ended with the last target has no further token."""
        num_more = self.num_committed + 1 if self.finish_reason is None else 0
        return self.prompt.num_tokens + num_more

    @property
    def num_rows_left(self) -> int:
        """Prompt rows that are not in the cache yet."""
        return max(self.prompt.num_tokens - self.cache.length, 0)

    @property
    def num_committed(self) -> int:
        return len(self.committed)

    @property
    def num_left(self) -> int:
        """Tokens that may still be committed."""
        return self.max_tokens - len(self.committed)

    @property
    def has_prompt_rows(self) -> bool:
        """All rows of the prompt are in the cache, in order, and the logits after them are kept."""
        is_whole = self.cache.hidden is None and self.cache.length >= self.prompt.num_tokens
        return is_whole and self.first_logits is not None

    @property
    def can_stride(self) -> bool:
        """No token needs anything else to be computed before the next: several may be decoded in one call."""
        return self.sampler.can_run_ahead and self.pruner is None and self.asked.logprobs is None

    @property
    def has_enough(self) -> bool:
        """No reason to wait for the draft: it has proposed enough, or does not follow (yet, or any more)."""
        if not self.speculation.is_followed:
            return True
        least = min(self.speculation.plan.min_draft_tokens, self._most_pending)
        pending = self.speculation.chain.pending
        num_useful = min(self.speculation.num_worth(), num_before_end(pending, self.stop_ids))
        return len(pending) >= least or num_useful < len(pending)

    def pending(self) -> list[int]:
        """The tokens for the next forward to verify: the draft's; if there are none, those that the grammar forces.

        Not one that ends the answer, since the row before it judges it, and none after it.
        """
        proposed = self.speculation.chain.pending
        if not proposed:
            return self._forced()
        most = min(self.speculation.num_worth(), self._most_pending, num_before_end(proposed, self.stop_ids))
        return proposed[:most]

    def _forced(self) -> list[int]:
        """Tokens that the grammar forces. After a rejection they save a one-row forward while the draft answers."""
        if self.grammar is None or self.speculation.mode is SpeculationMode.OFF:
            return []
        forced = self.grammar.forced(self.committed)[: min(self._most_pending, MAX_DRAFT_TOKENS)]
        return forced[: num_before_end(forced, self.stop_ids)]

    @property
    def _most_pending(self) -> int:
        """Most tokens that one forward may verify: within the answer's limit and within one selection of video rows."""
        most = self.num_left - 1
        return most if self.pruner is None else min(most, self.pruner.num_rows_left(self.cache.length) - 1)

    def take(self, proposal: Proposal | Declined) -> None:
        """Take a proposal that has arrived, or that none comes any more."""
        self.speculation.is_followed, self.speculation.expected_until = isinstance(proposal, Proposal), 0.0
        if isinstance(proposal, Declined):
            return
        self.speculation.draft_video_tokens = proposal.video_tokens
        self.work += proposal.work
        self.speculation.chain.extend(
            proposal.epoch, proposal.start, proposal.ids, proposal.confidences, self.committed
        )

    def rows(self, pending: list[int]) -> StepRows:
        """The last committed token and the draft tokens after it."""
        return StepRows(
            cache=self.cache,
            ids=self.committed[-1:] + pending,
            position=self.prompt.next_position + self.num_committed - 1,
            pruner=self.pruner,
        )

    def judge(self, pending: list[int], chosen: list[int]) -> Tokens:
        """Commit the draft tokens that are the target's own choice, then its next token; returns what the API is told.

        `chosen[i]` is the target's token after `pending[:i]`; the last of them judges the draft token after `pending`
        as well, if there is one. The cache is cut back to what is committed.
        """
        proposed = self.speculation.chain.pending[: len(pending) + 1]
        num_accepted = num_equal(proposed, chosen)
        is_rejected = num_accepted < len(proposed)
        num_lucky = self.speculation.chain.num_uncertain(num_accepted)
        committed = self.commit(chosen[: num_equal(pending, chosen) + 1])
        self.speculation.chain.settle(self.committed)
        self.cache.truncate(self.prompt.num_tokens + self.num_committed - 1)
        self.speculation.observe(num_lucky, is_rejected=is_rejected)
        num_rollbacks, num_wasted = self.speculation.chain.take_losses()
        return Tokens(
            request_id=self.request_id,
            ids=committed,
            # Tokens after an end were compared, too, but are no tokens of the answer.
            num_judged=min(num_accepted + is_rejected, len(committed)),
            num_accepted=min(num_accepted, len(committed)),
            num_rollbacks=num_rollbacks,
            num_wasted=num_wasted,
            draft_video_tokens=self.speculation.draft_video_tokens,
        )

    def commit(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append the target's own tokens up to an end-of-sequence id or the limit; returns what was appended.

        Raises GrammarError if the tokens may not follow the request's grammar.
        """
        if self.grammar is not None:
            self.grammar.check()
        before = len(self.committed)
        for token in tokens:
            self.committed.append(token)
            if token in self.stop_ids:
                self.finish_reason = FinishReason.STOP
            elif len(self.committed) == self.max_tokens:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                break
        return tuple(self.committed[before:])

    def report(self, tokens: Tokens, logits: Tensor | None) -> Tokens:
        """The last committed tokens with all else that the API is to be told with them, once.

        Token i was chosen from row i of `logits` [n, V], which may be None for requests that ask for no log
        probabilities.
        """
        if self.asked.logprobs is not None and logits is not None:
            tokens = with_logprobs(tokens, logits, self.asked.logprobs)
        if self.grammar is not None and Include.TOKEN_DETAILS in self.asked.include:
            tokens = with_forced(tokens, self.grammar, self.committed)
        if self.work:
            tokens = replace(tokens, work=tuple(self.work))
            self.work.clear()
        if self.num_cached:
            tokens, self.num_cached = replace(tokens, num_cached=self.num_cached), 0
        return tokens


def answer_limit(request: GenerationRequest, prompt: Prompt, context_length: int, default: int) -> int:
    """Most tokens of the answer; raises ContextOverflow if what the request asks for does not fit."""
    room = context_length - prompt.context_used
    wanted = request.max_tokens if request.max_tokens is not None else 1
    if room < wanted:
        # Tokens that compression has left out keep their positions, and some models' positions follow a video's time.
        reach = f" at positions up to {prompt.context_used}" if prompt.context_used > prompt.num_tokens else ""
        frames = "fewer frames, " if prompt.num_video_tokens else ""
        raise ContextOverflow(
            f"the prompt has {prompt.num_tokens} tokens ({prompt.num_video_tokens} of them video){reach} and the "
            f"answer needs {wanted} (max_tokens, 1 if not given), together more than the context of {context_length}; "
            f"send {frames}less text or a lower max_tokens"
        )
    return request.max_tokens if request.max_tokens is not None else min(default, room)


def pruner_of(dycoke: DyCoke, request: GenerationRequest, prompt: Prompt, num_layers: int) -> KVPruner | None:
    """Hides rows of the prompt while a request with DyCoke decodes; None for other requests."""
    return KVPruner.of(prompt, dycoke, num_layers) if request.compression is Compression.DYCOKE else None


def with_logprobs(tokens: Tokens, logits: Tensor, num_top: int) -> Tokens:
    """The message with the log probabilities of its ids, each by its row of logits [n, V], n >= len(ids).

    Natural logarithms of the model's own distribution: before temperature, penalties and everything else, as vLLM's
    `raw_logprobs`.
    """
    found = tuple(_row_logprobs(row, token, num_top) for row, token in zip(logits, tokens.ids, strict=False))
    return replace(tokens, logprobs=found)


def _row_logprobs(row: Tensor, token: int, num_top: int) -> RowLogprobs:
    """Computed from a copy of one row alone, as without proposals: the same numbers in every mode.

    A GPU adds up in another order where a row begins elsewhere in memory.
    """
    logprobs = row.to(torch.float32, copy=True).log_softmax(-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    return logprobs[token].item(), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def with_forced(tokens: Tokens, grammar: GrammarMask, committed: Sequence[int]) -> Tokens:
    """The message with the indices of those of its ids that the grammar forced; its ids end `committed`.

    Depends on grammar and answer, not on what was proposed: the same in every mode.
    """
    first = at = len(committed) - len(tokens.ids)
    forced: list[int] = []
    while at < len(committed):
        num_forced = num_equal(grammar.forced(committed[:at]), committed[at:])
        forced += range(at - first, at - first + num_forced)
        at += max(num_forced, 1)
    return replace(tokens, forced=tuple(forced))
