"""The target's side of the draft: the link, which requests the draft is asked to follow, and what it is told of them.

To follow a request, the draft runs its own vision tower, unless the target's is the same, and prefills the part of the
prompt that it sees. Where both models compute on the same cores, this work delays first tokens: those of requests that
wait for the cores, and the request's own, since the target prefills its prompt at the same time. So in `auto` the
target asks when the gain over the rest of the answer exceeds the work: at once for a request that has the cores to
itself if an answer of usual length is worth it, else as soon as the answer has become long enough.

For a request alone the work is what earlier ones took the draft. Among others it is estimated as the time of the
target's own preparation, whoever runs the tower: with a lower estimate, eight requests at once decoded a fifth faster,
but the last of them waited three times as long for their first tokens. The modes that force speculation ask at once.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from vidspec_models.core_share import CoreShare, OtherCores
from vidspec_models.decoder.decoder import QueryObserver
from vidspec_models.inputs import cell_rows, grid_checksum
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.preservation.text_queries import RelevanceLaw, TextQueries, using_threads
from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.ipc.channel import Channel, PeerLink
from vidspec_service.engine.ipc.messages import Configure, Follow, Message, Peer, Relevance, Verdict
from vidspec_service.engine.ipc.payload import TowerMemory, write_ids, write_scores
from vidspec_service.engine.speculation.plan import DOUBT, StepCosts
from vidspec_service.engine.target.request import TargetRequest

_FIRST_GUESS = 128  # tokens of an answer, before the first one has ended
_REMEMBERED = 32  # answers whose lengths tell how long the next ones may be
_MEMORY = 0.9  # weight of the values before the last one
_CAUTION = 1.5  # answers vary: to ask in vain costs three times as much as to ask late
_MOST_TOLD = 4096  # tokens inside a message; more go into shared memory


class DraftLink(PeerLink):
    """The link to the draft, which also sends the draft its verdicts."""

    def __init__(self) -> None:
        super().__init__("draft")
        self.shares_tower = False  # the draft uses the output of our vision tower
        self._other_cores = OtherCores([])

    def meet(self, peer: Peer, draft: Channel) -> None:
        """Use this channel from now on, to the draft that `peer` describes."""
        self.shares_tower = peer.shares_tower
        self._other_cores = OtherCores([] if peer.pid is None else [peer.pid])
        self.connect(draft)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send at once, or drop a draft that does not read. It wakes on another core: ours goes on working."""
        self._other_cores.keep()
        super().send(message, fds)

    def tell(self, request: TargetRequest) -> None:
        """Send a verdict with every committed token that this draft has not been told."""
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

    def __init__(self, draft: DraftLink, cores: CoreShare | None) -> None:
        """`cores` are the target's, if the draft uses them as well."""
        self._draft = draft
        self._cores = cores
        self._asked: set[str] = set()
        self._lengths = deque([_FIRST_GUESS], maxlen=_REMEMBERED)
        self._saved_s = math.inf  # by a draft, for each token of a request alone, as plans see it
        self._work_s = 0.0  # of the draft before its first proposal for a request alone

    def may_be_asked(self, request: GenerationRequest, num_sharing: int) -> bool:
        """Whether the draft is asked soon, if at all; `num_sharing` requests are on the target."""
        mode = request.speculation
        if self._draft.channel is None or mode is SpeculationMode.OFF:
            return False
        return mode is not SpeculationMode.AUTO or num_sharing == 1 or self._cores is None

    def is_asked_at_once(self, request: GenerationRequest, num_sharing: int) -> bool:
        """Whether to ask before anything is known of the answer."""
        if not self.may_be_asked(request, num_sharing):
            return False
        if request.speculation is not SpeculationMode.AUTO or self._cores is None:
            return True
        rest = self._rest(1, (request.max_tokens or math.inf) - 1)  # the first token comes with the prompt
        return rest > 0 and rest * self._saved_s > _CAUTION * self._work_s

    def ask(self, request_id: str, tower: TowerMemory | None = None) -> None:
        """Ask the draft to follow; `tower` is our vision tower's output, None if the draft must run its own."""
        self._asked.add(request_id)
        self._draft.send(Follow(request_id=request_id), () if tower is None else (tower.descriptor,))
        if self._cores is not None:
            self._cores.lend(self._work_s)

    def is_asked(self, request_id: str) -> bool:
        """Whether the connected draft was asked to follow this request."""
        return request_id in self._asked

    def replan(self, request: TargetRequest, costs: StepCosts, *, num_sharing: int) -> bool:
        """Plan how far the draft may run ahead of a decoding request, and ask it to follow if that pays by now.

        Returns whether the plan uses the draft and the draft was asked.
        """
        token_s = costs.alone_s
        is_asked = self.is_asked(request.request_id)
        if not is_asked and not self._pays(request, token_s, num_sharing):
            return False  # even proposals that take no time would not pay: no need to search a plan
        request.speculation.replan(costs)
        plan = request.speculation.plan
        saved_s = token_s * (1.0 - 1.0 / max(plan.speedup, 1.0))
        if num_sharing == 1 and request.speculation.mode is not SpeculationMode.OFF:
            self._saved_s = saved_s if math.isinf(self._saved_s) else _mean(self._saved_s, saved_s)
        if plan.is_off:
            return False
        if not is_asked and self._pays(request, saved_s, num_sharing):
            self.ask(request.request_id, request.tower)
            request.tower = None
        return self.is_asked(request.request_id)

    def observe(self, prepare_s: float) -> None:
        """Count the draft's work before its first proposal for a request. A shorter time counts at once: the first one
        after a start takes many times as long as others.
        """
        self._work_s = min(prepare_s, _mean(self._work_s or prepare_s, prepare_s))

    def end(self, request: TargetRequest) -> None:
        """Count the length of a complete answer and release its request.

        An answer without the draft says nothing of its work: the figure fades, or a slow hour would rule the draft out
        for good.
        """
        if not self.is_asked(request.request_id):
            self._work_s *= 1.0 - DOUBT
        self.release(request.request_id)
        self._lengths.append(request.num_committed)

    def release(self, request_id: str) -> None:
        """The request needs no more proposals."""
        self._asked.discard(request_id)

    def forget(self) -> None:
        """Start again with a new draft, which has not been asked anything yet."""
        self._asked.clear()

    def _pays(self, request: TargetRequest, saved_s: float, num_sharing: int) -> bool:
        """Whether to save `saved_s` for every token to come is worth the draft's work."""
        if request.speculation.mode is not SpeculationMode.AUTO or self._cores is None:
            return True
        rest = self._rest(request.num_committed, request.num_left)
        return rest * saved_s > (self._work_s if num_sharing == 1 else request.prepare_s * num_sharing)

    def _rest(self, num_committed: int, most: float) -> float:
        """Tokens still to come, by the earlier answers that were longer; if none was, what exceeds them once more."""
        rests = [length - num_committed for length in self._lengths if length > num_committed]
        return min(fmean(rests) if rests else num_committed - max(self._lengths), most)


def _mean(before: float, new: float) -> float:
    """The running mean of a value and those before it."""
    return _MEMORY * before + (1 - _MEMORY) * new


class RelevanceSource:
    """Records the text's queries during prefill; after the first token, tells a following draft the attention."""

    def __init__(self, model: VideoLM, config: Configure, draft: DraftLink) -> None:
        self._decoder = model.decoder
        self._preservation = config.engine.preservation
        self._prune_ratio = config.engine.prune_ratio
        self._draft = draft
        self._threads = config.threads

    def law_of(self, request: GenerationRequest) -> RelevanceLaw | None:
        """The attention by which the draft chooses this request's video tokens; None if it does not."""
        ratio = self._prune_ratio if request.prune_ratio is None else request.prune_ratio
        return STRATEGIES[request.preservation or self._preservation].relevance if ratio > 0 else None

    def observer(self, request: TargetRequest, num_rows: int) -> QueryObserver | None:
        """Records queries of the request's next `num_rows` prompt rows; None if nobody would read the result."""
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
        """Measure a prefilled prompt's attention, once, and send it to the draft, which has been asked to follow."""
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
        """Use what was recorded or measured for another answer to the same prompt."""
        request.text_queries = lender.text_queries
        if lender.relevance is not None:
            request.relevance = lender.relevance
            self.tell(request)

    def tell(self, request: TargetRequest) -> None:
        """Send the measured attention, if there is any; also to a draft that connected later."""
        if request.relevance is None:
            return
        message = Relevance(request_id=request.request_id, grid_checksum=grid_checksum(request.prompt))
        fd = write_scores(request.relevance)
        try:
            self._draft.send(message, (fd,))
        finally:
            os.close(fd)
