"""The target worker's loop: admit, prefill in chunks, verify all running requests in one forward, commit.

Continuous batching: requests join and leave between forwards, and at most one prefill chunk stands between two
decoding steps. Nothing waits at a barrier: a forward takes the proposals that have arrived, and waits for more only
while a request has fewer than its plan's minimum and waiting is predicted to pay.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from vidspec_models.errors import ContextOverflow
from vidspec_models.token_sampling import CoupledSampler
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.channels import Channel, wait_readable
from vidspec_service.engine.conversion import prepare_prompt, sampling_law
from vidspec_service.engine.draft_link import DraftLink
from vidspec_service.engine.messages import (
    Accepted,
    Cancel,
    Configure,
    Ended,
    Generate,
    Peer,
    Rejected,
    Tokens,
)
from vidspec_service.engine.meter import HEARTBEAT_S, WorkMeter
from vidspec_service.engine.payload import close_payload
from vidspec_service.engine.running import Running
from vidspec_service.engine.sequence import TargetSequence
from vidspec_service.engine.speculation import CostMeter, Speculation
from vidspec_service.engine.types import SpeculationMode

_REPLAY_ROWS = 16
_PATIENCE = 2.0  # wait at most this many times as long as the draft should need


@dataclass(slots=True)
class _Waiting:
    request: Generate
    payload: int
    received: float


@dataclass(slots=True)
class TargetLoop:
    """Owns every request on the target device. Single-threaded; ends when the API's channel closes."""

    model: VideoLM
    api: Channel
    config: Configure
    costs: CostMeter
    _draft: DraftLink = field(default_factory=DraftLink)
    _waiting: deque[_Waiting] = field(default_factory=deque)
    _prefilling: deque[Running] = field(default_factory=deque)
    _decoding: dict[str, Running] = field(default_factory=dict)
    _acceptance: float = 0.85  # of requests so far; where a new request starts from
    _meter: WorkMeter = field(default_factory=WorkMeter)

    def run(self) -> None:
        """Serve until the API's channel closes (ChannelClosed propagates to the worker's shell)."""
        while True:
            self._receive()
            with self._meter:
                self._admit()
                self._prefill()
            self._await_proposals()
            with self._meter:
                self._verify()
            self._rest()
            active = len(self._prefilling) + len(self._decoding)
            self._meter.beat(self.api, active, len(self._waiting), self._cache_tokens())

    @property
    def context_length(self) -> int:
        limit = self.config.max_context
        return min(self.model.context_length, limit) if limit else self.model.context_length

    def _cache_tokens(self) -> int:
        return sum(running.cache.capacity for running in (*self._prefilling, *self._decoding.values()))

    def _rest(self) -> None:
        if not (self._waiting or self._prefilling or self._decoding):
            wait_readable(self._channels(), HEARTBEAT_S)

    def _channels(self) -> list[Channel]:
        return [self.api] if self._draft.channel is None else [self.api, self._draft.channel]

    def _receive(self) -> None:
        while (received := self.api.receive()) is not None:
            message, fds = received
            if isinstance(message, Generate):
                self._waiting.append(_Waiting(message, fds[0], time.monotonic()))
            elif isinstance(message, Cancel):
                self._cancel(message.request_id)
            elif isinstance(message, Peer):
                self._meet(Channel.from_fd(fds[0]))
        for proposal in self._draft.proposals():
            self.costs.draft_s = proposal.step_s
            running = self._decoding.get(proposal.request_id)
            if running is not None:
                chain, committed = running.speculation.chain, running.sequence.committed
                chain.extend(proposal.epoch, proposal.start, proposal.ids, committed)

    def _meet(self, draft: Channel) -> None:
        """A new draft: it is told every running request's committed tokens."""
        self._draft.connect(draft)
        for running in self._decoding.values():
            running.speculation.drop()
            self._plan(running)

    def _cancel(self, request_id: str) -> None:
        if self._decoding.pop(request_id, None) is not None:
            self._draft.release(request_id)
        self._prefilling = deque(item for item in self._prefilling if item.request_id != request_id)
        for item in [item for item in self._waiting if item.request.request_id == request_id]:
            self._waiting.remove(item)
            close_payload(item.payload)

    def _admit(self) -> None:
        """Move one waiting request to prefilling; one a turn, since its vision tower takes a while."""
        if not self._waiting or len(self._prefilling) + len(self._decoding) >= self.config.max_running:
            return
        waiting = self._waiting.popleft()
        request_id = waiting.request.request_id
        started = time.monotonic()
        try:
            running = self._prepare(waiting)
        except ContextOverflow as error:
            self.api.send(Rejected(request_id=request_id, kind="context_length", message=str(error)))
        except (ValueError, IndexError, KeyError, TypeError) as error:  # this request's input, nobody else's
            message = f"the prompt could not be prepared ({type(error).__name__})"
            self.api.send(Rejected(request_id=request_id, kind="failed", message=message))
        else:
            self._prefilling.append(running)
            self.api.send(
                Accepted(
                    request_id=request_id,
                    prompt_tokens=running.prompt.num_tokens,
                    video_tokens=running.prompt.num_video_tokens,
                    queue_s=started - waiting.received,
                    prepare_s=time.monotonic() - started,
                )
            )

    def _prepare(self, waiting: _Waiting) -> Running:
        request = waiting.request
        prompt = prepare_prompt(self.model, waiting.payload)
        room = self.context_length - prompt.num_tokens
        wanted = request.max_tokens if request.max_tokens is not None else 1
        if room < wanted:
            raise ContextOverflow(
                f"the prompt has {prompt.num_tokens} tokens ({prompt.num_video_tokens} of them video) and "
                f"max_tokens is {wanted}, together more than the context of {self.context_length}; "
                "ask for fewer frames or fewer tokens"
            )
        max_tokens = request.max_tokens or room
        sequence = TargetSequence(self.model.stop_ids, max_tokens)
        if request.committed:
            sequence.commit(request.committed)
        return Running(
            request_id=request.request_id,
            prompt=prompt,
            cache=self.model.new_cache(prompt.num_tokens + max_tokens),
            sequence=sequence,
            sampler=CoupledSampler(sampling_law(request)),
            speculation=Speculation(mode=SpeculationMode(request.speculation), acceptance=self._acceptance),
        )

    def _prefill(self) -> None:
        """One chunk of the oldest prompt; the last chunk yields the first token."""
        if not self._prefilling:
            return
        running = self._prefilling[0]
        logits = self.model.prefill(running.prompt, running.cache, self.config.prefill_chunk)
        if logits is None:
            return
        self._prefilling.popleft()
        self._decoding[running.request_id] = running
        if running.sequence.committed:
            self._replay(running)
        else:
            committed = running.sequence.commit(running.sampler.choose(logits[None], 0))
            self._publish(running, committed, 0, 0)

    def _replay(self, running: Running) -> None:
        """Bring back the cache rows of a request whose first target died, in the row counts of verification."""
        known = running.sequence.committed[:-1]
        for start in range(0, len(known), _REPLAY_ROWS):
            position = running.prompt.next_position + start
            ids = known[start : start + _REPLAY_ROWS]
            self.model.step([StepRows(cache=running.cache, ids=ids, position=position)])
        self._plan(running)

    def _await_proposals(self) -> None:
        """Wait while a request lacks proposals, unless other work is there or the draft takes too long."""
        if self._prefilling or self._waiting:
            return
        short = [running.speculation.plan.minimum for running in self._decoding.values() if not running.has_enough]
        if not short:
            return
        deadline = time.monotonic() + _PATIENCE * max(short) * self.costs.draft_s + HEARTBEAT_S / 200
        while (left := deadline - time.monotonic()) > 0:
            wait_readable(self._channels(), left)
            self._receive()
            if all(running.has_enough for running in self._decoding.values()):
                return

    def _verify(self) -> None:
        """One forward over the last committed token and the proposals of every decoding request."""
        batch = list(self._decoding.values())
        if not batch:
            return
        started = time.monotonic()
        proposed = [running.pending() for running in batch]
        logits = self.model.step([running.rows(ids) for running, ids in zip(batch, proposed, strict=True)])
        chosen = [
            running.sampler.choose(scores, running.num_committed) for running, scores in zip(batch, logits, strict=True)
        ]
        self.costs.forward(sum(len(tokens) for tokens in chosen), time.monotonic() - started)
        for running, pending, tokens in zip(batch, proposed, chosen, strict=True):
            committed, num_accepted = running.judge(pending, tokens)
            self._publish(running, committed, len(pending), num_accepted)

    def _publish(self, running: Running, committed: tuple[int, ...], num_proposed: int, num_accepted: int) -> None:
        """Tell the draft first, which is waiting, then the API."""
        if running.sequence.finish_reason is None:
            self._plan(running)
        self.api.send(
            Tokens(
                request_id=running.request_id,
                ids=committed,
                num_proposed=num_proposed,
                num_accepted=num_accepted,
            )
        )
        if running.sequence.finish_reason is not None:
            del self._decoding[running.request_id]
            self._draft.release(running.request_id)
            self._acceptance = 0.8 * self._acceptance + 0.2 * running.speculation.acceptance
            self.api.send(Ended(request_id=running.request_id, finish_reason=running.sequence.finish_reason.value))

    def _plan(self, running: Running) -> None:
        """Choose how far the draft may run from here on, and tell it what is committed."""
        if self._draft.channel is None:
            running.speculation.drop()
            return
        running.speculation.replan(self.costs.costs(len(self._decoding)))
        if not running.speculation.plan.is_off:
            self._draft.tell(running)
