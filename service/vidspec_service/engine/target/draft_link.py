"""The target's link to the draft, and what it sends there: verdicts and the attention of prefilled prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from vidspec_models.core_share import CoreAvoidance, torch_threads
from vidspec_models.decoder.decoder import QueryObserver
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.preservation.text_queries import SoftmaxOver, TextQueries
from vidspec_models.prompt import cell_rows, grid_checksum
from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.ipc.channel import Channel, PeerLink
from vidspec_service.engine.ipc.messages import Configure, Message, Peer, Relevance, Verdict
from vidspec_service.engine.ipc.payload import close_fds, write_ids, write_scores
from vidspec_service.engine.target.request import TargetRequest

_MAX_INLINE_IDS = 4096  # in a message; more go into shared memory


class DraftLink(PeerLink):
    """The link to the draft, which also sends the draft its verdicts."""

    def __init__(self) -> None:
        super().__init__("draft")
        self.shares_tower = False  # the draft uses the output of our vision tower
        self.shares_gpu = False  # the draft computes on a GPU of ours, while we do not
        self._core_avoidance = CoreAvoidance([])

    def connect_to(self, peer: Peer, draft: Channel) -> None:
        """Use this channel from now on, to the draft that `peer` describes."""
        self.shares_tower, self.shares_gpu = peer.shares_tower, peer.shares_gpu
        self._core_avoidance = CoreAvoidance([] if peer.pid is None else [peer.pid])
        self.connect(draft)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send at once, or drop a draft that does not read. It wakes on another core: ours goes on working."""
        if self.channel is not None:  # else its process may have ended, and another one may have the id
            self._core_avoidance.update()
        super().send(message, fds)

    def send_verdict(self, request: TargetRequest) -> None:
        """Send a verdict with every committed token that this draft does not know."""
        speculation, committed = request.speculation, request.committed
        start, ids = speculation.num_sent, tuple(committed[speculation.num_sent :])
        speculation.num_sent = len(committed)
        is_long = len(ids) > _MAX_INLINE_IDS
        verdict = Verdict(
            request_id=request.request_id,
            start=start,
            ids=() if is_long else ids,
            max_lead=speculation.plan.max_lead,
            min_draft_tokens=speculation.plan.min_draft_tokens,
        )
        fds = [write_ids(ids)] if is_long else []
        try:
            self.send(verdict, fds)
        finally:
            close_fds(fds)


class RelevanceMeter:
    """Records the text's queries during prefill; after the first token, sends the draft the attention they give."""

    def __init__(self, model: VideoLM, config: Configure, draft: DraftLink) -> None:
        self._decoder = model.decoder
        self._preservation = config.engine.preservation
        self._prune_ratio = config.engine.prune_ratio
        self._draft = draft
        self._threads = config.threads

    def law_of(self, request: GenerationRequest) -> SoftmaxOver | None:
        """The attention by which the draft chooses this request's video tokens; None if it does not."""
        ratio = self._prune_ratio if request.prune_ratio is None else request.prune_ratio
        return STRATEGIES[request.preservation or self._preservation].relevance if ratio > 0 else None

    def observer(self, request: TargetRequest, num_rows: int) -> QueryObserver | None:
        """Records queries of the request's next `num_rows` prompt rows; None if nobody would read the result."""
        is_read = self._draft.channel is not None and request.speculation.mode is not SpeculationMode.OFF
        if self.law_of(request.asked) is None or not is_read or request.relevance is not None:
            return None
        if request.text_queries is None:
            request.text_queries = TextQueries(request.prompt, self._decoder.geometry, self._decoder.scale)
        return request.text_queries.observer(request.cache.length, num_rows)

    def measure(self, request: TargetRequest) -> None:
        """Measure a prefilled prompt's attention, once, and send it to the draft, which has been asked to follow."""
        queries, request.text_queries = request.text_queries, None
        cache, law = request.cache, self.law_of(request.asked)
        if queries is None or law is None or cache.length < request.prompt.num_tokens or cache.hidden is not None:
            return  # rows that compression hides are out of order
        with torch_threads(self._threads):  # the draft works on its own core, and waits for this
            relevance = queries.relevance(cache, law)
        cells = cell_rows(request.prompt)
        if relevance is None or not len(cells):
            return
        values = relevance[cells]
        request.relevance = (values / values.max().clamp(min=1e-12)).cpu().numpy().astype(np.float16)
        self.send(request)

    def copy(self, request: TargetRequest, sibling: TargetRequest) -> None:
        """Use what was recorded or measured for another answer to the same prompt."""
        request.text_queries = sibling.text_queries
        if sibling.relevance is not None:
            request.relevance = sibling.relevance
            self.send(request)

    def send(self, request: TargetRequest) -> None:
        """Send the measured attention, if there is any; also to a draft that connected later."""
        if request.relevance is None:
            return
        message = Relevance(request_id=request.request_id, grid_checksum=grid_checksum(request.prompt))
        fd = write_scores(request.relevance)
        try:
            self._draft.send(message, (fd,))
        finally:
            os.close(fd)
