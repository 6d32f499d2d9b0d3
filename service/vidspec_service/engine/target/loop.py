"""The target worker's loop: admit, prefill in chunks, verify all requests in one forward, commit.

Continuous batching: requests join and leave between forwards, and at most one prefill chunk stands between two
decoding steps. Nothing waits at a barrier: a forward takes the proposals that have arrived, and waits for more only
while a request has fewer than its plan's `min_draft_tokens` and waiting is predicted to pay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeGuard

from torch import Tensor

from vidspec_models.compression import REFRESH_TOKENS
from vidspec_models.errors import ContextOverflow, ConversationRefused
from vidspec_models.grammar import GrammarError
from vidspec_models.prompt import Prompt
from vidspec_models.request import SpeculationMode
from vidspec_models.sampling import sample_all
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.config import ALONE_PREFILL_ROWS
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, ChannelFull, wait_readable
from vidspec_service.engine.ipc.messages import (
    MAX_HELD_TOKENS,
    Cancel,
    Configure,
    Declined,
    Ended,
    Generate,
    Message,
    Peer,
    Proposal,
    Rejected,
    Tokens,
)
from vidspec_service.engine.speculation.plan import FADE, CostMeter, SpeculationState
from vidspec_service.engine.target.draft_gate import DraftGate
from vidspec_service.engine.target.draft_link import DraftLink, RelevanceMeter
from vidspec_service.engine.target.ngram_draft import NGRAM_TOKEN_S, NgramDraft
from vidspec_service.engine.target.request import TargetRequest, answer_limit, pruner_of
from vidspec_service.engine.target.scheduler import Scheduler
from vidspec_service.engine.types import Phase, PromptReady, RejectReason
from vidspec_service.engine.worker.input_processor import QueuedRequest
from vidspec_service.engine.worker.loop import HEARTBEAT_S, WorkerLoop

_REPLAY_ROWS = REFRESH_TOKENS  # so the rows of a replay step of a compressed request share one selection
_WAIT_RATIO = 2.0  # wait at most this many times as long as the draft should need, plus _SLACK_S
_SLACK_S = 0.005
_MIN_STRIDE = 2  # tokens of a stride
# Stream intervals that a stride may take; where no other process has a core, none of 600 took so long.
_MAX_STRIDE_INTERVALS = 3.0
_INITIAL_ACCEPTANCE = 0.95  # of a draft not tried (lately): too high on purpose, or the draft would never be tried
_ACCEPTANCE_WEIGHT = 0.2  # weight of the last answer in the mean acceptance
_STRIDE_PAUSE = 12  # single-token forwards after a stride cut short: a model may never want what a grammar does
# Other errors fail the request.
_REJECT_REASONS: dict[type[Exception], RejectReason] = {
    ContextOverflow: RejectReason.TOO_LONG,
    ConversationRefused: RejectReason.INVALID,
    GrammarError: RejectReason.INVALID,
}

logger = logging.getLogger(__name__)


class TargetLoop(WorkerLoop):
    """The loop on the target's device; `costs` were measured at load."""

    def __init__(self, model: VideoLM, api: Channel, config: Configure, costs: CostMeter) -> None:
        self._draft = DraftLink()
        super().__init__(model, api, config, self._draft)
        self._vocabulary_size = model.vocabulary_size
        self._costs = costs
        if costs.stride_s is not None and costs.stride_s * _MIN_STRIDE > self._config.stream_interval_s:
            costs.stride_s = None  # never used: each token is sent before the next one is computed
        self._scheduler = Scheduler(self._pool, self._config.max_running_requests, self._prefill_rows)
        self._gate = DraftGate(
            self._draft, model.decoder.cores if model.decoder.geometry.device.type == "cpu" else None
        )
        self._relevance = RelevanceMeter(model, config, self._draft)
        self._ngrams = NgramDraft() if config.engine.has_ngram_draft else None
        if self._ngrams is not None:
            costs.draft_s = NGRAM_TOKEN_S
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._acceptance = _INITIAL_ACCEPTANCE  # mean of the answers so far

    def _work(self) -> bool:
        with self._meter:
            self._admit()
            has_prompts = bool(self._scheduler.prefilling)
            self._prefill()
            if has_prompts:
                self._receive()  # proposals that arrived meanwhile, in time for this forward
            self._outbox.flush_if_due()
        self._await_proposals()
        with self._meter:
            self._verify()
            self._outbox.flush_if_due()
        return self._scheduler.can_compute or self._scheduler.can_admit

    def _receive(self) -> None:
        while (received := self._api.receive()) is not None:
            message, fds = received
            if isinstance(message, Generate):
                self._scheduler.waiting.append(QueuedRequest.of(message, fds))
            elif isinstance(message, Cancel):
                self._forget(message.request_id)
            elif isinstance(message, Peer):
                self._connect(message, Channel.from_fd(fds[0]))
        messages = [message for message, _ in self._draft.receive() if self._is_usable(message)]
        prepared = {request.request_id: request for request in self._scheduler.prepared} if messages else {}
        for about in messages:
            if isinstance(about, Proposal):
                self._costs.draft_s = about.step_s or self._costs.draft_s
                if about.prepare_s:
                    self._gate.observe(about.prepare_s)
            # After a gap the rest of the chain would be dropped: so preempted requests take proposals, too.
            if about.request_id in prepared:
                prepared[about.request_id].take(about)
            elif (item := self._scheduler.preparing.get(about.request_id)) is not None:
                item.proposals.append(about)

    def _is_usable(self, message: Message) -> TypeGuard[Proposal | Declined]:
        """Whether a draft's message can be taken: a forward with an id that is no token's would end this worker."""
        if isinstance(message, Proposal):
            return max(message.ids, default=0) < self._vocabulary_size
        return isinstance(message, Declined)

    def _connect(self, peer: Peer, draft: Channel) -> None:
        """Connect a new draft: tell it each decoding request's committed tokens, a preempted one's when it resumes."""
        self._draft.connect_to(peer, draft)
        self._gate.forget()
        for item in self._scheduler.preparing.values():
            item.proposals.clear()
        for request in self._scheduler.prepared:
            request.speculation.drop()
            if request.request_id in self._scheduler.decoding:
                self._plan(request)
            self._relevance.send(request)

    def _forget(self, request_id: str) -> None:
        self._scheduler.cancel(request_id)
        self._inputs.cancel(request_id)
        self._gate.release(request_id)

    def _admit(self) -> None:
        """Start to prepare waiting requests; those that are prepared enter the scheduler or are refused."""
        while (item := self._scheduler.begin_preparing()) is not None:
            num_sharing = self._scheduler.num_unfinished
            if self._draft.shares_tower:
                item.returns_tower_output = self._gate.may_ask(item.request, num_sharing)
            elif self._gate.should_ask_early(item.request, num_sharing):
                self._gate.ask(item.request_id, max_lead=self._first_lead(item.request.speculation))
            self._inputs.submit(item)
        for item in self._inputs.take_finished():
            if self._scheduler.end_preparing(item.request_id):
                with self._containing_errors(item.request_id):
                    self._add(item)

    def _add(self, item: QueuedRequest) -> None:
        """Add a prepared request. Raises what preparing raised, and ContextOverflow if the answer does not fit."""
        if not isinstance(prompt := item.prompt, Prompt):
            raise prompt or ValueError("there is no prompt")
        request = item.request
        added = TargetRequest(
            asked=request,
            prompt=prompt,
            cache=self._pool.new_cache(),
            sampler=item.sampler(self._model.stop_ids),
            grammar=item.grammar,
            speculation=SpeculationState(mode=request.speculation, acceptance=self._acceptance),
            stop_ids=request.end_ids(self._model.stop_ids),
            max_tokens=answer_limit(request, prompt, self.context_length, self._config.default_max_tokens),
            pruner=pruner_of(self._config.dycoke, request, prompt, self._pool.geometry.num_layers),
            prepare_s=item.prepare_s,
            tower=item.tower,
        )
        added.commit(request.committed)
        for proposal in item.proposals:
            added.take(proposal)
        self._scheduler.add(added)
        # A draft that shares our vision tower was not asked before, since it needs the tower's output.
        if self._draft.shares_tower and self._gate.should_ask_early(request, self._scheduler.num_unfinished):
            self._gate.ask(item.request_id, added.tower, self._first_lead(request.speculation))
            added.tower = None
        self._report_prepare(item, prompt.num_tokens)
        self._outbox.send(
            PromptReady(
                request_id=item.request_id,
                prompt_tokens=prompt.num_tokens,
                video_tokens=prompt.num_video_tokens,
                queue_s=item.queue_s,
                prepare_s=item.prepare_s,
                reasoning=item.reasoning,
            )
        )

    @contextmanager
    def _containing_errors(self, request_id: str) -> Iterator[None]:
        """If the block raises, reject the request and forget it; raises only errors that concern others, too.

        Not for steps that several requests share, where it is unknown which of them causes an error.
        """
        try:
            yield
        except (ChannelClosed, ChannelFull):
            raise
        except Exception as error:
            reason = _REJECT_REASONS.get(type(error), RejectReason.FAILED)
            if reason is RejectReason.FAILED:
                logger.exception("request %s failed", request_id)
                self._require_device()
            self._forget(request_id)
            is_clear = reason is not RejectReason.FAILED or isinstance(error, ValueError)
            message = str(error) if is_clear else type(error).__name__
            self._outbox.send(Rejected(request_id=request_id, reason=reason, message=message))

    def _prefill(self) -> None:
        """Prefill one chunk of the prompt whose turn it is; the last chunk yields the first token."""
        request = self._scheduler.next_prefill()
        if request is None:
            return
        if not request.num_rows_left:
            self._replay(request)
            return
        if (sibling := self._scheduler.sibling(request)) is not None:
            self._copy_prompt(request, sibling)
            return
        self._scheduler.restore(request)
        num_rows = min(self._num_prefill_rows(), request.num_rows_left)
        if not self._scheduler.allocate(request, num_rows):
            return
        self._outbox.flush()
        self._meter.rows(num_rows)
        started = time.monotonic()
        with self._containing_errors(request.request_id):
            observer = self._relevance.observer(request, num_rows)
            logits = self._model.prefill(request.prompt, request.cache, num_rows, observer)
            self._report_prefill(request.asked, started, num_rows)
            if logits is None:
                return
            self._begin_decoding(request, logits)

    def _num_prefill_rows(self) -> int:
        """Rows of a chunk; where bits do not depend on it, the cheapest number, or half the usual while others decode.

        Streams stop for longer than the same rows take alone, since a vision tower or a video decoder may use the same
        cores: 30 to 65 ms for 128 rows of a small model, 14 to 30 ms for 64.
        """
        if self._config.prefill_chunk is not None or not self._model.is_chunk_invariant:
            return self._prefill_rows
        return self._prefill_rows // 2 if self._scheduler.decoding else ALONE_PREFILL_ROWS

    def _copy_prompt(self, request: TargetRequest, sibling: TargetRequest) -> None:
        """Copy the prompt's rows from another answer to the same prompt: they have the bits of a prefill."""
        num_rows = request.prompt.num_tokens
        if not self._scheduler.allocate(request, num_rows - request.cache.length) or not sibling.has_prompt_rows:
            return  # no room for both of them now
        assert sibling.first_logits is not None
        with self._containing_errors(request.request_id):
            request.cache.truncate(0)
            request.cache.copy_rows(sibling.cache, num_rows)
            self._relevance.copy(request, sibling)
            self._begin_decoding(request, sibling.first_logits)

    def _begin_decoding(self, request: TargetRequest, logits: Tensor) -> None:
        """The prompt is in the cache, `logits` [V] come after it: commit the first token, unless tokens are committed.

        Those are replayed next, beginning with the request's next turn to prefill.
        """
        if request.asked.parent_id is not None:
            request.first_logits = logits
        if self._draft.shares_gpu and self._gate.may_ask(request.asked, self._scheduler.num_unfinished):
            self._relevance.measure(request)  # not beside the draft, which then sees at once what it will in the end
        if request.finish_reason is not None:  # the last target died between the last token and the end
            self._scheduler.begin_decoding(request)
            self._end(request)
        elif not request.committed:
            self._scheduler.begin_decoding(request)
            self._publish(request, request.judge([], request.sampler.sample(logits[None], [])), logits[None])

    def _replay(self, request: TargetRequest) -> None:
        """Compute rows of committed tokens as verification did, after a preemption or the last target's death.

        About as many as in a chunk: other streams wait for them, and an answer may have thousands.
        """
        num_done, num_known = request.cache.length - request.prompt.num_tokens, request.num_committed - 1
        num_rows = min(max(self._num_prefill_rows() // _REPLAY_ROWS, 1) * _REPLAY_ROWS, num_known - num_done)
        if not self._scheduler.allocate(request, num_rows):
            return
        self._outbox.flush()
        with self._containing_errors(request.request_id):
            for start in range(num_done, num_done + num_rows, _REPLAY_ROWS):
                ids = request.committed[start : min(start + _REPLAY_ROWS, num_known)]
                position = request.prompt.next_position + start
                self._model.step([StepRows(cache=request.cache, ids=ids, position=position, pruner=request.pruner)])
            if num_done + num_rows == num_known:
                self._scheduler.begin_decoding(request)
                self._plan(request)

    def _await_proposals(self) -> None:
        """Wait while a request lacks proposals, unless other work is there or the draft takes too long."""
        decoding = self._scheduler.decoding.values()
        if self._scheduler.num_unfinished == 1:
            latest = max((request.speculation.expected_until for request in decoding), default=0.0)
            if not self._wait_until(latest, lambda request: not request.speculation.expected_until):
                return
            if self._draft.channel is not None and any(request.speculation.expected_until for request in decoding):
                self._gate.observe_timeout()
        for request in decoding:
            request.speculation.expected_until = 0.0  # late, or not alone any more: no stream waits for another's draft
        if self._scheduler.prefilling:
            return
        short = [request for request in decoding if not request.has_enough]
        num_tokens = max((request.speculation.plan.min_draft_tokens for request in short), default=0)
        deadline = time.monotonic() + _WAIT_RATIO * num_tokens * self._costs.draft_s + _SLACK_S
        if self._wait_until(deadline, lambda request: request.has_enough):
            for request in decoding:
                request.speculation.is_followed &= request.has_enough  # late: no waiting until the draft proposes again

    def _wait_until(self, deadline: float, is_served: Callable[[TargetRequest], bool]) -> bool:
        """Wait for the draft until all decoding requests are served; False if other work is there first."""
        decoding = self._scheduler.decoding
        while not all(map(is_served, decoding.values())) and (left := deadline - time.monotonic()) > 0:
            if self._draft.channel is None:  # it has died meanwhile, or is no process at all
                break
            self._outbox.flush()
            wait_readable(self._wakers, min(left, HEARTBEAT_S))
            self._receive()
            self._beat()
            if self._scheduler.can_admit or self._inputs.has_finished:
                return False
        return True

    def _verify(self) -> None:
        """One forward over the last committed token and the draft tokens of every decoding request."""
        batch = list[tuple[TargetRequest, list[int]]]()
        for request in sorted(self._scheduler.decoding.values(), key=lambda each: each.ticket):
            pending = request.pending()
            # Making room for an older request may have preempted this one, but never one that is in the batch.
            is_there = request.request_id in self._scheduler.decoding
            if is_there and self._scheduler.allocate(request, 1 + len(pending)):
                batch.append((request, pending))
        if not batch or (len(batch) == 1 and self._decode_stride(*batch[0])):
            return
        started = time.monotonic()
        early = [  # a mask depends on tokens alone, and other threads run during a forward
            self._masks.submit(request.grammar.prepare, request.committed, pending)
            for request, pending in batch
            if request.grammar is not None
        ]
        logits = self._model.step([request.rows(pending) for request, pending in batch])
        wait(mask for mask in early if not mask.cancel())  # masks that no core was free for are made when needed
        chosen = sample_all(
            [
                (request.sampler, rows, request.committed, pending)
                for (request, pending), rows in zip(batch, logits, strict=True)
            ]
        )
        num_rows = sum(len(tokens) for tokens in chosen)
        self._meter.rows(num_rows)
        for (request, pending), rows, tokens in zip(batch, logits, chosen, strict=True):
            with self._containing_errors(request.request_id):
                request.work += self._activity(request.asked, Phase.VERIFY, started, len(tokens))
                self._publish(request, request.judge(pending, tokens), rows)
                request.next_stride = min(request.next_stride + 1, _MIN_STRIDE)
        self._costs.observe(num_rows, time.monotonic() - started)  # with the messages: every forward costs them

    def _decode_stride(self, request: TargetRequest, pending: list[int]) -> bool:
        """Decode as many tokens in one call as would be sent together anyway; False if that is not possible (now).

        Only for a request without proposals, and while nothing else is prepared: threads that wait for each other
        suffer most from other threads. It pays: the work between two steps of a small model takes about as long as one.
        """
        if pending or not request.speculation.is_alone or self._scheduler.num_active > 1:
            return False
        num_timely = int(self._config.stream_interval_s / self._costs.costs(1, in_strides=True).alone_s)
        most = min(request.next_stride, request.num_left, num_timely, MAX_HELD_TOKENS)
        if most < _MIN_STRIDE or not request.can_stride:
            return False
        if not self._scheduler.allocate(request, most):
            return True  # preempted: nothing left to do for the request now
        started, longest_s = time.monotonic(), _MAX_STRIDE_INTERVALS * self._config.stream_interval_s
        with self._containing_errors(request.request_id):
            tokens = self._model.decode(request.rows([]), request.sampler, request.committed, most, longest_s)
            request.next_stride = 2 * most if len(tokens) == most else -_STRIDE_PAUSE
            if tokens:
                self._meter.rows(len(tokens))
                request.work += self._activity(request.asked, Phase.VERIFY, started, len(tokens))
                self._publish(request, request.judge(tokens[:-1], tokens))
                self._costs.observe_stride((time.monotonic() - started) / len(tokens))
            return bool(tokens)
        return True

    def _publish(self, request: TargetRequest, tokens: Tokens, logits: Tensor | None = None) -> None:
        """Tell the draft first, since it waits, then the API; for `logits` see `TargetRequest.report`."""
        if request.finish_reason is None:
            self._plan(request)
        self._outbox.send(request.report(tokens, logits))
        if request.finish_reason is not None:
            self._end(request)
        elif self._gate.is_asked(request.request_id):
            self._relevance.measure(request)

    def _end(self, request: TargetRequest) -> None:
        self._scheduler.finish(request.request_id)
        self._gate.end(request)
        if self._ngrams is not None:
            self._ngrams.end(request)
        self._remember(request.speculation)
        assert request.finish_reason is not None
        self._outbox.send(Ended(request_id=request.request_id, finish_reason=request.finish_reason))

    def _remember(self, speculation: SpeculationState) -> None:
        """Learn from an answer how good the draft is; while plans rule it out, old figures count less and less."""
        if speculation.is_measured:
            self._acceptance += _ACCEPTANCE_WEIGHT * (speculation.acceptance - self._acceptance)
        elif speculation.mode is not SpeculationMode.OFF:
            self._acceptance += FADE * (_INITIAL_ACCEPTANCE - self._acceptance)
            self._costs.fade_steps()
            if self._ngrams is None:  # an n-gram draft's time is known
                self._costs.fade_draft()

    def _first_lead(self, mode: SpeculationMode) -> int:
        """How many tokens the draft may propose while the target prefills the prompt; none if they take turns."""
        if mode is SpeculationMode.SERIAL:
            return 0
        speculation = SpeculationState(mode=mode, acceptance=self._acceptance)
        speculation.replan(self._costs.costs(max(len(self._scheduler.decoding), 1)), take_turns=False)
        return speculation.plan.max_lead

    def _plan(self, request: TargetRequest) -> None:
        """Choose how far the draft may run from here on, and tell the draft what is committed."""
        if request.speculation.mode is SpeculationMode.OFF:
            return
        costs = self._costs.costs(len(self._scheduler.decoding), in_strides=request.can_stride)
        if self._ngrams is not None:
            request.speculation.replan(costs, take_turns=False)
            self._ngrams.propose(request)
        elif self._draft.channel is None:
            request.speculation.drop()
        elif self._gate.replan(request, costs, num_sharing=self._scheduler.num_unfinished):
            self._draft.send_verdict(request)
