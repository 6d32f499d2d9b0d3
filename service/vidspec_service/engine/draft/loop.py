"""The draft worker's loop: prefill the prompt, run ahead of the committed tokens, roll back on a verdict.

The draft never decides anything: whatever it proposes, the text is the target's. So after an error on a request, only
the draft drops the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace
from torch import Tensor

from vidspec_models.errors import ContextOverflow
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.prompt import Prompt
from vidspec_models.request import Include
from vidspec_models.sampling import DraftToken, propose_all
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.draft.request import MIN_CALL_TOKENS, DraftRequest, PrunedView
from vidspec_service.engine.ipc.channel import Channel, PeerLink
from vidspec_service.engine.ipc.messages import (
    Cancel,
    Configure,
    Declined,
    Follow,
    Generate,
    Peer,
    Proposal,
    Relevance,
    Verdict,
)
from vidspec_service.engine.ipc.payload import CellScores, TowerMemory, close_fds, read_ids, read_scores
from vidspec_service.engine.speculation.proposals import CERTAIN
from vidspec_service.engine.types import Phase
from vidspec_service.engine.worker.input_processor import QueuedRequest
from vidspec_service.engine.worker.loop import WorkerLoop

_PACE_MEMORY = 0.95  # weight of earlier calls in the time per token
# Of a call that makes several tokens: verdicts wait meanwhile, and tokens after a wrong one are lost.
_MAX_CALL_S = 0.002

logger = logging.getLogger(__name__)


class DraftLoop(WorkerLoop):
    """The loop on the draft's device."""

    def __init__(self, model: VideoLM, api: Channel, config: Configure) -> None:
        self._target = PeerLink("target")
        super().__init__(model, api, config, self._target)
        self._offered: dict[str, QueuedRequest] = {}  # requests that the target has not asked to follow (yet)
        # The target's messages about requests not prepared yet.
        self._early: dict[str, list[Follow | Verdict | CellScores]] = {}
        self._active: dict[str, DraftRequest] = {}  # oldest first
        self._proposer = Proposer(model)

    def _work(self) -> bool:
        with self._meter:
            worked = self._admit()
            worked = self._prefill() or worked
            return self._propose() or worked

    def _receive(self) -> None:
        """Handle the target's messages after the API's: they are about requests that the API has sent before."""
        target, from_target = self._target.channel, self._target.receive()
        while (received := self._api.receive()) is not None:
            message, fds = received
            if isinstance(message, Generate):
                self._early[message.request_id] = []
                self._offered[message.request_id] = QueuedRequest.of(message, fds)
            elif isinstance(message, Cancel):
                self._forget(message.request_id)
            elif isinstance(message, Peer):
                self._connect(Channel.from_fd(fds[0]))
        is_another = self._target.channel not in (None, target)  # a new target tells everything again
        for message, fds in from_target:
            if is_another:
                close_fds(fds)
            elif isinstance(message, Follow):
                self._follow(message, TowerMemory(fds[0]) if fds else None)
            elif isinstance(message, Verdict):
                self._handle(replace(message, ids=read_ids(fds[0])) if fds else message)
            elif isinstance(message, Relevance):
                self._handle(read_scores(message, fds[0]))

    def _connect(self, target: Channel) -> None:
        """Connect a (new) target, which will tell every request's committed tokens from the start."""
        self._target.connect(target)
        self._early = {request_id: [] for request_id in self._early}
        for request in self._active.values():
            request.restart()

    def _follow(self, message: Follow, tower: TowerMemory | None) -> None:
        """Prepare a request; `tower` is the target's vision tower's output, if the draft can use it."""
        request_id = message.request_id
        if (offered := self._offered.pop(request_id, None)) is not None:
            offered.tower = tower
            self._early[request_id].append(message)
            self._inputs.submit(offered)
        elif request_id not in self._early and request_id not in self._active:
            self._decline(request_id)  # a new target asks, or the API has not offered it any more

    def _handle(self, message: Follow | Verdict | CellScores) -> None:
        if message.request_id in self._early:
            self._early[message.request_id].append(message)
        elif message.request_id not in self._active:  # it failed here, was cancelled or was given up
            return
        elif isinstance(message, Verdict) and max(message.ids, default=0) >= self._model.vocabulary_size:
            # A forward with an id that is no token's would end this worker.
            logger.warning("the draft has no token %d, and stops working on %s", max(message.ids), message.request_id)
            self._decline(message.request_id)
        else:
            with self._containing_errors(message.request_id):
                self._active[message.request_id].handle(message)

    @contextmanager
    def _containing_errors(self, request_id: str) -> Iterator[None]:
        """An error in the block, above all in choosing what the draft sees, costs only this request its draft."""
        try:
            yield
        except Exception:
            logger.exception("the draft stops working on request %s after an error", request_id)
            self._require_device()
            self._decline(request_id)

    def _decline(self, request_id: str) -> None:
        """Work no more on a request; the target need not wait for its draft."""
        self._forget(request_id)
        self._target.send(Declined(request_id=request_id))

    def _forget(self, request_id: str) -> None:
        self._early.pop(request_id, None)
        self._offered.pop(request_id, None)
        self._inputs.cancel(request_id)
        request = self._active.pop(request_id, None)
        if request is not None:
            self._pool.release(request.cache)

    def _allocate(self, request: DraftRequest, num_rows: int) -> bool:
        """Make room for more rows; if there is none, give up the youngest request, which costs only its speed."""
        while not self._pool.grow(request.cache, request.cache.length + num_rows):
            youngest = next(reversed(self._active))
            self._decline(youngest)
            if youngest == request.request_id:
                return False
        return True

    def _admit(self) -> bool:
        finished = self._inputs.take_finished()
        for item in finished:
            early = self._early.pop(item.request_id, None)
            if early is None:
                continue  # cancelled meanwhile
            if isinstance(item.prompt, Prompt) and item.prompt.context_used + 2 > self._model.context_length:
                item.prompt = ContextOverflow("its prompt leaves no room in the draft's context")  # for a second token
            if isinstance(item.prompt, Exception):
                logger.warning("the draft cannot work on request %s: %s", item.request_id, item.prompt)
                self._require_device()
                self._decline(item.request_id)
                continue
            with self._containing_errors(item.request_id):
                started = time.monotonic()
                scores = next((message for message in early if isinstance(message, CellScores)), None)
                request = self._active[item.request_id] = self._draft_request(item, scores)
                request.prepare_s = item.prepare_s + time.monotonic() - started
                self._report_prepare(item, request.prompt.num_tokens)
            for message in early:
                if not isinstance(message, CellScores):
                    self._handle(message)
        return bool(finished)

    def _draft_request(self, item: QueuedRequest, scores: CellScores | None) -> DraftRequest:
        prompt, request = item.prompt, item.request
        assert isinstance(prompt, Prompt)
        room = self._model.context_length - prompt.context_used
        return DraftRequest(
            asked=request,
            view=PrunedView(
                prompt,
                STRATEGIES[request.preservation or self._config.preservation],
                self._config.prune_ratio if request.prune_ratio is None else request.prune_ratio,
                request.sampling.seed,
                scores,
            ),
            cache=self._pool.new_cache(),
            sampler=item.sampler(self._model.stop_ids),
            grammar=item.grammar,
            max_tokens=min(request.max_tokens or room, room),
            stop_ids=request.end_ids(self._model.stop_ids),
        )

    def _prefill(self) -> bool:
        request = next((item for item in self._active.values() if not item.is_prefilled), None)
        if request is None:
            return False
        others = [item for item in self._active.values() if item.is_prefilled and item.view.is_same_as(request.view)]
        if others:  # answers to the same prompt
            self._copy_prompt(request, others[0])
            return True
        num_rows = min(self._prefill_rows, request.prompt.num_tokens - request.cache.length)
        if self._allocate(request, num_rows):
            self._report_view(request)
            self._meter.rows(num_rows)
            started = time.monotonic()
            logits = self._model.prefill(request.prompt, request.cache, num_rows)
            if request.prepare_s is not None:
                request.prepare_s += time.monotonic() - started
            self._report_prefill(request.asked, started, num_rows)
            if logits is not None and request.may_begin:
                self._target.send(self._proposer.begin(request, logits))
        return True

    def _copy_prompt(self, request: DraftRequest, sibling: DraftRequest) -> None:
        """Copy the prompt's rows from another answer to the same prompt.

        Making room cannot give the sibling up: a younger one was prefilled after this request had room for its prompt,
        which the request keeps when its view is chosen again.
        """
        num_rows = request.prompt.num_tokens
        if self._allocate(request, num_rows - request.cache.length):
            request.cache.truncate(0)
            self._report_view(request)
            request.cache.copy_rows(sibling.cache, num_rows)
            request.prepare_s = None  # a copy says nothing about the work for another prompt

    def _report_view(self, request: DraftRequest) -> None:
        """Report the view when its first row is prefilled: after each choice of the view."""
        if request.cache.length == 0 and Include.DRAFT_VIEW in request.asked.include:
            self._api.send(request.view.event(request.request_id))

    def _propose(self) -> bool:
        """The next tokens of every request with room, in one forward."""
        if self._target.channel is None:
            return False
        started = time.monotonic()
        running = [item for item in self._active.values() if item.is_prefilled and item.can_run]
        batch = [  # oldest first: room for one may cost a younger one its own
            (item, forced)
            for item, forced in [(item, item.forced()) for item in running]
            if item.request_id in self._active
            and self._allocate(item, len(item.missing) + len(forced) + item.num_at_once)
        ]
        if not batch:
            return self._refresh_view()
        num_given = sum(len(item.missing) for item, _ in batch)
        proposals = self._proposer.propose(batch)
        self._meter.rows(num_given + sum(len(proposal.ids) - 1 for proposal in proposals))
        for (request, _), proposal in zip(batch, proposals, strict=True):
            num_tokens = len(proposal.ids)
            work = self._activity(request.asked, Phase.PROPOSE, started, num_tokens)
            self._target.send(replace(proposal, work=work) if work else proposal)
        return True

    def _refresh_view(self) -> bool:
        """Choose a request's view again: while it is prefilled, the target has enough draft tokens to verify."""
        for request in [item for item in self._active.values() if not item.has_ended]:
            with self._containing_errors(request.request_id):
                if request.refresh_view():
                    return True
        return False


class Proposer:
    """Makes draft tokens for every request with room, and measures the time per token."""

    def __init__(self, model: VideoLM) -> None:
        self._model = model
        self._token_s = 0.0  # recent seconds per token

    def propose(self, batch: Sequence[tuple[DraftRequest, Sequence[int]]]) -> list[Proposal]:
        """One proposal for each request, with one forward for all that may propose.

        A proposal has first the tokens that the grammar forces, which need no forward, then the guessed ones: one
        message is read sooner than two. A request that is alone may get several tokens. The caches have room for them.
        """
        places = [request.sequence.propose(forced, are_certain=True) for request, forced in batch]
        for request, forced in batch:
            request.is_steered |= bool(forced)
        asked = [request for request, _ in batch if request.num_left > 0]
        proposed = dict(zip([request.request_id for request in asked], self._draft_tokens(asked), strict=True))
        return [
            self._proposal(request, place, forced, proposed.get(request.request_id, []))
            for place, (request, forced) in zip(places, batch, strict=True)
        ]

    def begin(self, request: DraftRequest, logits: Tensor) -> Proposal:
        """Propose an answer's first token, by the logits [V] after the prompt: the target has not chosen it yet."""
        guesses = propose_all([(request.sampler, logits[None], [])])
        return self._proposal(request, (request.sequence.epoch, 0), (), guesses)

    def _draft_tokens(self, batch: Sequence[DraftRequest]) -> list[list[DraftToken]]:
        if not batch:
            return []
        started = time.monotonic()
        asked = [(request.rows(), request.sampler, request.sequence.tokens) for request in batch]
        num_timely = max(int(_MAX_CALL_S / self._token_s), 1) if self._token_s else MIN_CALL_TOKENS
        num_missing = batch[0].min_draft_tokens - batch[0].sequence.num_uncertain  # no verdict comes before them
        most = min(batch[0].num_at_once, max(num_timely, num_missing))
        guesses = self._model.propose(asked, most)
        if len(batch) == 1:  # a model may never want what its grammar does
            batch[0].is_steered = batch[0].grammar is not None and len(guesses[0]) < most
        took = (time.monotonic() - started) / max(map(len, guesses))
        self._token_s = _PACE_MEMORY * self._token_s + (1 - _PACE_MEMORY) * took if self._token_s else took
        return guesses

    def _proposal(
        self, request: DraftRequest, place: tuple[int, int], forced: Sequence[int], proposed: Sequence[DraftToken]
    ) -> Proposal:
        """The proposal of a request whose sequence already has the forced tokens."""
        guessed = request.propose(proposed)
        epoch, start = place
        prepare_s, request.prepare_s = request.prepare_s, None
        return Proposal(
            request_id=request.request_id,
            epoch=epoch,
            start=start,
            ids=(*forced, *(each.token for each in guessed)),
            confidences=(*(CERTAIN for _ in forced), *(each.confidence for each in guessed)),
            step_s=self._token_s,
            video_tokens=request.view.num_video_tokens,
            prepare_s=prepare_s or 0.0,
        )
