"""The target's side of the draft: the link to it, which requests it is asked to follow, and what it is told of them.

To follow, the draft runs its own tower over the video, unless the target's is the same, and prefills what it sees of
it. Where both models compute on the same cores, that work is taken from requests that wait for theirs. So in `auto` it
is asked for at once only for a request that has the cores to itself, and for others when the gain over the rest of the
answer exceeds the work, which is put at what the target's own preparation took, whoever runs the tower: eight at once
whose drafts followed at a lower price decoded a fifth faster, and the last of them waited three times as long for their
first tokens. The modes that force speculation ask at once.
"""

from __future__ import annotations

import os

import numpy as np

from vidspec_models.decoder.decoder import QueryObserver
from vidspec_models.inputs import cell_rows, grid_checksum
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.preservation.text_queries import RelevanceLaw, TextQueries, using_threads
from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.ipc.channel import PeerLink
from vidspec_service.engine.ipc.messages import Configure, Follow, Relevance, Verdict
from vidspec_service.engine.ipc.payload import TowerMemory, write_ids, write_scores
from vidspec_service.engine.speculation.plan import StepCosts
from vidspec_service.engine.target.request import TargetRequest

_FIRST_GUESS = 128.0  # tokens of an answer, before there was one
_MEMORY = 0.9  # weight of the answers before the last one
_MOST_TOLD = 4096  # tokens in a message itself


class DraftLink(PeerLink):
    """The link to the draft, and what it knows of each request."""

    def __init__(self) -> None:
        super().__init__("draft")
        self.shares_tower = False  # it takes what ours makes of a video

    def tell(self, request: TargetRequest) -> None:
        """A verdict: every committed token that this draft has not heard of."""
        speculation, committed = request.speculation, request.committed
        start, ids = speculation.num_told, tuple(committed[speculation.num_told :])
        speculation.num_told = len(committed)
        is_long = len(ids) > _MOST_TOLD
        verdict = Verdict(
            request_id=request.request_id,
            start=start,
            ids=() if is_long else ids,
            max_lead=speculation.plan.max_lead,
        )
        if not is_long:
            self.send(verdict)
            return
        fd = write_ids(ids)
        try:
            self.send(verdict, (fd,))
        finally:
            os.close(fd)


class DraftGate:
    """Which requests the connected draft was asked to follow, and whether one more would pay."""

    def __init__(self, draft: DraftLink, *, shares_cores: bool) -> None:
        self._draft = draft
        self._shares_cores = shares_cores
        self._asked: set[str] = set()
        self._answer_tokens = _FIRST_GUESS

    def is_asked_at_once(self, request: GenerationRequest, num_sharing: int) -> bool:
        """Whether the draft is to follow before anything is known of the answer; `num_sharing` are on the target."""
        mode = request.speculation
        if self._draft.channel is None or mode is SpeculationMode.OFF:
            return False
        return mode is not SpeculationMode.AUTO or self._is_free(num_sharing)

    def ask(self, request_id: str, tower: TowerMemory | None = None) -> None:
        """Have the draft follow; `tower` is what ours has made of the videos, None if the draft must run its own."""
        self._asked.add(request_id)
        self._draft.send(Follow(request_id=request_id), () if tower is None else (tower.descriptor,))

    def is_asked(self, request_id: str) -> bool:
        """Whether the draft was."""
        return request_id in self._asked

    def replan(self, request: TargetRequest, costs: StepCosts, *, num_sharing: int) -> bool:
        """Plan how far the draft may run ahead of a decoding request, and ask it to follow if that pays by now.

        Returns whether it follows.
        """
        token_s = costs.alone_s
        is_asked = self.is_asked(request.request_id)
        if not is_asked and not self._pays(request, token_s, num_sharing):
            return False  # not even proposals that take no time would pay: no plan need be searched
        request.speculation.replan(costs)
        plan = request.speculation.plan
        if plan.is_off:
            return False
        if not is_asked and self._pays(request, token_s * (1.0 - 1.0 / max(plan.speedup, 1.0)), num_sharing):
            self.ask(request.request_id)
        return self.is_asked(request.request_id)

    def end(self, request: TargetRequest) -> None:
        """An answer is complete."""
        self.release(request.request_id)
        self._answer_tokens = _MEMORY * self._answer_tokens + (1 - _MEMORY) * request.num_committed

    def release(self, request_id: str) -> None:
        """The request needs no more proposals."""
        self._asked.discard(request_id)

    def forget(self) -> None:
        """Another draft, which was asked nothing yet."""
        self._asked.clear()

    def _pays(self, request: TargetRequest, saved_s: float, num_sharing: int) -> bool:
        """Whether the draft's work is worth `saved_s` for every token to come."""
        if request.speculation.mode is not SpeculationMode.AUTO or self._is_free(num_sharing):
            return True
        # Up to the usual length there is the rest of that to come, and beyond it as much again as it is over.
        rest = min(abs(self._answer_tokens - request.num_committed), request.num_left)
        return rest * saved_s > request.prepare_s * num_sharing

    def _is_free(self, num_sharing: int) -> bool:
        return num_sharing == 1 or not self._shares_cores


class RelevanceSource:
    """Notes the text's queries while they are prefilled; a draft that follows is told once the first token is out."""

    def __init__(self, model: VideoLM, config: Configure, draft: DraftLink) -> None:
        self._decoder = model.decoder
        self._preservation = config.engine.preservation
        self._prune_ratio = config.engine.prune_ratio
        self._draft = draft
        self._threads = config.threads

    def law_of(self, request: GenerationRequest) -> RelevanceLaw | None:
        """Which attention the request's draft chooses by, if it does."""
        ratio = self._prune_ratio if request.prune_ratio is None else request.prune_ratio
        return STRATEGIES[request.preservation or self._preservation].relevance if ratio > 0 else None

    def observer(self, request: TargetRequest, num_rows: int) -> QueryObserver | None:
        """For the request's next `num_rows` prompt rows; None where nobody would read the result."""
        law = self.law_of(request.asked)
        is_read = self._draft.channel is not None and request.speculation.mode is not SpeculationMode.OFF
        if law is None or not is_read or request.relevance is not None:
            return None
        start, queries = request.cache.length, request.text_queries
        if start == 0 or queries is None:  # an earlier prompt may have left the first rows here
            layers = self._decoder.geometry.num_layers
            queries = request.text_queries = TextQueries(request.prompt, law, layers, self._decoder.scale)
        return queries.observer(start, num_rows)

    def measure(self, request: TargetRequest) -> None:
        """Of a prompt that has been prefilled, unless that was done: tell the draft, which has been asked to follow."""
        queries, request.text_queries = request.text_queries, None
        cache = request.cache
        if queries is None or cache.length < request.prompt.num_tokens or cache.hidden is not None:
            return  # rows that compression hides are out of order
        with using_threads(self._threads):  # the draft is at work on its core, and waits for this
            relevance = queries.relevance(cache)
        cells = cell_rows(request.prompt)
        if relevance is None or not len(cells):
            return
        values = relevance[cells]
        request.relevance = (values / values.max().clamp(min=1e-12)).cpu().numpy().astype(np.float16)
        self.tell(request)

    def borrow(self, request: TargetRequest, lender: TargetRequest) -> None:
        """What was measured of another answer to the same prompt, or is still to be, holds for this one."""
        request.text_queries = lender.text_queries
        if lender.relevance is not None:
            request.relevance = lender.relevance
            self.tell(request)

    def tell(self, request: TargetRequest) -> None:
        """What was measured, if anything: also for a draft that came later."""
        if request.relevance is None:
            return
        message = Relevance(request_id=request.request_id, grid_checksum=grid_checksum(request.prompt))
        fd = write_scores(request.relevance)
        try:
            self._draft.send(message, (fd,))
        finally:
            os.close(fd)
