"""RelevanceSource: the target measures, in its prefill, what its text looks at, and tells the draft."""

from __future__ import annotations

import os

import numpy as np

from vidspec_models.decoder import QueryObserver
from vidspec_models.preservation import TextQueries, cell_rows, find_strategy, grid_checksum
from vidspec_models.processor import using_threads
from vidspec_models.request import SpeculationMode
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.ipc.messages import Configure, Relevance
from vidspec_service.engine.ipc.payload import CellScores, write_scores
from vidspec_service.engine.target.draft_gate import DraftLink
from vidspec_service.engine.target.request import TargetRequest


class RelevanceSource:
    """Notes the text's queries while they are prefilled; the draft is told once the first token is out."""

    def __init__(self, model: VideoLM, config: Configure, draft: DraftLink) -> None:
        self._decoder = model.decoder
        engine = config.engine
        self._law = find_strategy(engine.preservation).relevance if engine.prune_ratio > 0 else None
        self._draft = draft
        self._threads = config.threads

    def observer(self, request: TargetRequest, num_rows: int) -> QueryObserver | None:
        """For the request's next `num_rows` prompt rows; None where nobody would read the result."""
        is_read = self._draft.channel is not None and request.speculation.mode is not SpeculationMode.OFF
        if self._law is None or not is_read or request.relevance is not None:
            return None
        prompt, start = request.prompt, request.cache.length
        if start == 0 or request.text_queries is None:  # an earlier prompt may have left the first rows here
            layers = self._decoder.geometry.num_layers
            request.text_queries = TextQueries(prompt, self._law, layers, self._decoder.scale)
        return request.text_queries.observer(start, num_rows) if request.text_queries is not None else None

    def measure(self, request: TargetRequest) -> None:
        """Its prompt has just been prefilled: tell the draft, unless the request has ended or lost its room again."""
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
        request.relevance = CellScores(
            request_id=request.request_id,
            grid_checksum=grid_checksum(request.prompt),
            values=(values / values.max().clamp(min=1e-12)).cpu().numpy().astype(np.float16),
        )
        self.tell(request)

    def tell(self, request: TargetRequest) -> None:
        """What was measured, if anything: also for a draft that came later."""
        if (scores := request.relevance) is None:
            return
        message = Relevance(request_id=scores.request_id, grid_checksum=scores.grid_checksum)
        fd = write_scores(scores)
        try:
            self._draft.send(message, (fd,))
        finally:
            os.close(fd)
