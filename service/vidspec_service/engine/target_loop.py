"""The target worker's loop: admit, prefill in chunks, verify all running requests in one forward, commit.

Continuous batching: requests join and leave between forwards, and at most one prefill chunk stands between two
decoding steps. Nothing waits at a barrier: a forward takes the proposals that have arrived, and waits for more only
while a request has fewer than its plan's minimum and waiting is predicted to pay.
"""

from __future__ import annotations

import time

from vidspec_models.compression.dycoke import REFRESH_TOKENS
from vidspec_models.kv_cache import KVPool
from vidspec_models.token_sampling import CoupledSampler, choose_all
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.channels import Channel, Readable, wait_readable
from vidspec_service.engine.compressing import TargetCompression
from vidspec_service.engine.conversion import answer_limit, sampling_law
from vidspec_service.engine.draft_link import DraftLink
from vidspec_service.engine.faults import Faults
from vidspec_service.engine.following import Following
from vidspec_service.engine.messages import Accepted, Cancel, Configure, Generate, Peer
from vidspec_service.engine.meter import HEARTBEAT_S, WorkMeter
from vidspec_service.engine.preparing import Prepared, Preparer, Waiting
from vidspec_service.engine.relevance import RelevanceSource
from vidspec_service.engine.roster import Roster
from vidspec_service.engine.running import Judged, Running
from vidspec_service.engine.sequence import TargetSequence
from vidspec_service.engine.speculation import CostMeter, Speculation
from vidspec_service.engine.types import SpeculationMode

_REPLAY_ROWS = REFRESH_TOKENS  # no row of a compressed request's replay lies beyond its selection
_PATIENCE = 2.0  # wait at most this many times as long as the draft should need, and a little
_SLACK_S = 0.005


class TargetLoop:
    """Owns every request on the target device. Single-threaded; ends when the API's channel closes."""

    def __init__(self, model: VideoLM, api: Channel, config: Configure, costs: CostMeter) -> None:
        self._model = model
        self._api = api
        self._config = config
        self._costs = costs
        self._pool = KVPool(model.decoder.geometry, config.kv_tokens)
        self._compression = TargetCompression(config.dycoke, model.decoder.geometry.num_layers)
        self._preparer = Preparer(model, config.encoded_bytes, self._compression.prompt)
        self._roster = Roster(self._pool, config.max_running, config.prefill_chunk)
        self._draft = DraftLink()
        self._following = Following(self._draft, shares_cores=model.decoder.embedding.device.type == "cpu")
        self._faults = Faults(api, self._roster, self._following, model.decoder.geometry)
        self._relevance = RelevanceSource(model, config, self._draft)
        self._acceptance = 0.85  # of requests so far; where a new request starts from
        self._meter = WorkMeter(is_traced=config.trace)

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
            if not (self._roster.can_compute or self._roster.can_admit):
                wait_readable(self._sources(), HEARTBEAT_S)
            self._meter.beat(self._api, self._roster.num_active, len(self._roster.waiting), self._pool.num_used)

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer: what the model, the operator and the cache budget allow."""
        limit = self._config.max_context or self._model.context_length
        return min(self._model.context_length, limit, self._pool.num_tokens)

    def _sources(self) -> list[Readable]:
        """Everything that may wake the loop."""
        sources: list[Readable] = [self._api, self._preparer]
        return sources if self._draft.channel is None else [*sources, self._draft.channel]

    def _receive(self) -> None:
        while (received := self._api.receive()) is not None:
            message, fds = received
            if isinstance(message, Generate):
                self._roster.waiting.append(Waiting(message, fds[0], time.monotonic()))
            elif isinstance(message, Cancel):
                self._roster.cancel(message.request_id)
                self._following.release(message.request_id)
            elif isinstance(message, Peer):
                self._meet(Channel.from_fd(fds[0]))
        entered = {running.request_id: running for running in self._roster.entered}
        for proposal in self._draft.proposals():
            self._costs.draft_s = proposal.step_s
            if proposal.request_id in entered:  # paused ones as well: a chain with a gap would never be taken again
                entered[proposal.request_id].take(proposal)

    def _meet(self, draft: Channel) -> None:
        """A new draft: it is told every running request's committed tokens, those of paused ones when they resume."""
        self._draft.connect(draft)
        self._following.forget()
        for running in self._roster.entered:
            running.speculation.drop()
            if running.request_id in self._roster.decoding:
                self._plan(running)
            self._relevance.tell(running)

    def _admit(self) -> None:
        """Have waiting requests prepared; those that are enter the roster or are refused."""
        while (waiting := self._roster.next_waiting()) is not None:
            self._following.begin(waiting.request, num_sharing=self._roster.num_unfinished)
            self._preparer.submit(waiting)
        for prepared in self._preparer.finished():
            request = prepared.waiting.request
            if not self._roster.is_wanted(request.request_id):
                continue
            with self._faults.confined_to(request.request_id):
                self._enter(request, prepared)

    def _enter(self, request: Generate, prepared: Prepared) -> None:
        """Raises what preparing raised, and ContextOverflow if the answer does not fit."""
        if isinstance(prompt := prepared.result, Exception):
            raise prompt
        most = answer_limit(request, prompt, self.context_length, self._config.default_max_tokens)
        sequence = TargetSequence(self._model.stop_ids, most)
        sequence.commit(request.committed)
        num_cached = self._roster.enter(
            Running(
                request_id=request.request_id,
                prompt=prompt,
                cache=self._pool.new_cache(),
                sequence=sequence,
                sampler=CoupledSampler(sampling_law(request)),
                speculation=Speculation(mode=SpeculationMode(request.speculation), acceptance=self._acceptance),
                pruner=self._compression.pruner(request, prompt),
                prepare_s=prepared.prepare_s,
            )
        )
        self._api.send(
            Accepted(
                request_id=request.request_id,
                prompt_tokens=prompt.num_tokens,
                video_tokens=prompt.num_video_tokens,
                cached_tokens=num_cached,
                queue_s=prepared.queue_s,
                prepare_s=prepared.prepare_s,
            )
        )

    def _prefill(self) -> None:
        """One chunk of the oldest prompt; the last chunk yields the first token."""
        running = self._roster.next_prefill()
        if running is None:
            return
        num_rows = min(self._config.prefill_chunk, running.prompt.num_tokens - running.cache.length)
        if not self._roster.secure(running, num_rows):
            return
        self._meter.rows(num_rows)
        with self._faults.confined_to(running.request_id):
            observer = self._relevance.observer(running, num_rows)
            logits = self._model.prefill(running.prompt, running.cache, num_rows, observer)
            if logits is None:
                return
            if running.sequence.finish_reason is not None:  # the last target died between the last token and the end
                self._roster.begin_decoding(running)
                self._end(running)
                return
            if running.sequence.committed:
                self._replay(running)
            else:
                self._roster.begin_decoding(running)
                committed = running.sequence.commit(running.sampler.choose(logits[None], 0))
                self._publish(running, Judged(committed=committed))
            self._relevance.measure(running)

    def _replay(self, running: Running) -> None:
        """Bring back the rows of a request that was paused, or whose first target died, as verification made them."""
        known = running.sequence.committed[:-1]
        if not self._roster.secure(running, len(known)):
            return
        self._roster.begin_decoding(running)
        for start in range(0, len(known), _REPLAY_ROWS):
            position = running.prompt.next_position + start
            ids = known[start : start + _REPLAY_ROWS]
            self._model.step([StepRows(cache=running.cache, ids=ids, position=position, pruner=running.pruner)])
        self._plan(running)

    def _await_proposals(self) -> None:
        """Wait while a request lacks proposals, unless other work is there or the draft takes too long."""
        roster = self._roster
        if roster.prefilling:
            return
        short = [running.speculation.plan.minimum for running in roster.decoding.values() if not running.has_enough]
        if not short:
            return
        deadline = time.monotonic() + _PATIENCE * max(short) * self._costs.draft_s + _SLACK_S
        while (left := deadline - time.monotonic()) > 0:
            wait_readable(self._sources(), left)
            self._receive()
            if all(running.has_enough for running in roster.decoding.values()):
                return
        for running in roster.decoding.values():
            running.speculation.is_followed &= running.has_enough  # late: not waited for until it proposes again

    def _verify(self) -> None:
        """One forward over the last committed token and the proposals of every decoding request."""
        batch = [(running, running.pending()) for running in self._roster.decoding.values()]
        batch = [item for item in batch if self._is_secured(*item)]
        # Securing one request's room may have paused another one of this very batch.
        batch = [(running, pending) for running, pending in batch if running.request_id in self._roster.decoding]
        if not batch:
            return
        started = time.monotonic()
        logits = self._model.step([running.rows(pending) for running, pending in batch])
        judges = [(running.sampler, running.num_committed) for running, _ in batch]
        chosen = choose_all([(law, rows, at) for (law, at), rows in zip(judges, logits, strict=True)])
        num_rows = sum(len(tokens) for tokens in chosen)
        self._costs.forward(num_rows, time.monotonic() - started)
        self._meter.rows(num_rows)
        for (running, pending), tokens in zip(batch, chosen, strict=True):
            self._publish(running, running.judge(pending, tokens))

    def _is_secured(self, running: Running, pending: list[int]) -> bool:
        is_there = running.request_id in self._roster.decoding  # or paused for an older one a moment ago
        return is_there and self._roster.secure(running, 1 + len(pending))

    def _publish(self, running: Running, judged: Judged) -> None:
        """Tell the draft first, which is waiting, then the API."""
        if running.sequence.finish_reason is None:
            self._plan(running)
        self._api.send(running.told(judged))
        if running.sequence.finish_reason is not None:
            self._end(running)

    def _end(self, running: Running) -> None:
        self._roster.finish(running.request_id)
        self._following.ended(running)
        self._acceptance = 0.8 * self._acceptance + 0.2 * running.speculation.acceptance
        self._api.send(running.ended())

    def _plan(self, running: Running) -> None:
        """Choose how far the draft may run from here on, and tell it what is committed."""
        if self._draft.channel is None:
            running.speculation.drop()
            return
        costs = self._costs.costs(len(self._roster.decoding))
        if self._following.follows(running, costs, num_sharing=self._roster.num_unfinished):
            self._draft.tell(running)
