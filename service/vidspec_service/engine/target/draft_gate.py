"""Which requests the draft is asked to follow.

To follow a request, the draft runs its own vision tower, unless the target's is the same, and prefills the part of the
prompt that it sees. Where both models compute on the same cores, this work delays first tokens: those of requests that
wait for the cores, and the request's own, since the target prefills its prompt at the same time. So in `auto` the
target asks when the gain over the rest of the answer exceeds the work: at once for a request that has the cores to
itself if an answer as long as those to the same question is worth it, else as soon as it has become long enough.

For a request alone the work is what earlier ones took the draft. Among others it is estimated as the time of the
target's own preparation, whoever runs the tower: with a lower estimate, eight requests at once decoded a fifth faster,
but the last of them waited three times as long for their first tokens. The modes that force speculation ask at once.

A GPU that both models share alternates between their processes, a kernel or a few milliseconds each: while the target
computes, a draft's first 512 rows take 1.9 s instead of 0.13 (0.5B beside 7B, H100). So there the target asks when it
begins to decode, and leaves the GPU to the draft until its first proposal comes.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from statistics import fmean

from vidspec_models.core_share import CoreShare
from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_service.engine.ipc.messages import Follow
from vidspec_service.engine.ipc.payload import TowerMemory
from vidspec_service.engine.speculation.plan import FADE, StepCosts
from vidspec_service.engine.target.draft_link import DraftLink
from vidspec_service.engine.target.request import TargetRequest

_FIRST_GUESS = 128  # tokens of an answer, before the first one has ended
_REMEMBERED = 32  # answers to a question, or different questions, by which the next answer's length is expected
_MAX_QUESTIONS = 1024
_MEMORY = 0.9  # weight of the values before the last one
_MAX_WORKS = 8  # measurements of the draft's work that are kept
_CAUTION = 1.5  # answers vary: to ask in vain costs three times as much as to ask late
_PROPOSAL_TIMEOUT_RATIO = 3.0  # wait at most this many times as long for a first proposal as one of the last ones took
_MIN_PROPOSAL_TIMEOUT_S = 1.0  # or as long as this, since the next video may be a longer one


class AnswerLengths:
    """Lengths of earlier answers, by which the rest of another one is expected.

    Many clients ask the same question about one video after another. Its answers tell more than others do.
    """

    def __init__(self) -> None:
        self._by_question: OrderedDict[int, deque[int]] = OrderedDict()  # those asked last come last

    def add(self, request: GenerationRequest, length: int) -> None:
        """Count a complete answer."""
        question = hash(request.turns)
        lengths = self._by_question.pop(question, None) or deque(maxlen=_REMEMBERED)
        lengths.append(length)
        self._by_question[question] = lengths
        if len(self._by_question) > _MAX_QUESTIONS:
            self._by_question.popitem(last=False)

    def expected_rest(self, request: GenerationRequest, num_committed: int, most: float) -> float:
        """Expected number of tokens still to come, at most `most`.

        The mean over the earlier answers to the same question that were longer than this one is by now; if none was,
        the number of tokens by which this one exceeds the longest. For a new question, the last other questions count.
        """
        lengths: Sequence[int] = self._by_question.get(hash(request.turns), ())
        if not lengths:
            lengths = [each[-1] for each in islice(reversed(self._by_question.values()), _REMEMBERED)] or [_FIRST_GUESS]
        rests = [length - num_committed for length in lengths if length > num_committed]
        return min(fmean(rests) if rests else num_committed - max(lengths), most)


class DraftGate:
    """Which requests the connected draft was asked to follow, and whether one more would pay."""

    def __init__(self, draft: DraftLink, cores: CoreShare | None) -> None:
        """`cores` are the target's, if the draft uses them as well."""
        self._draft = draft
        self._cores = cores
        self._asked: set[str] = set()
        self._lengths = AnswerLengths()
        self._saved_s = math.inf  # that the draft saves per token of a request that is alone, by the last plans
        self._work_s = 0.0  # of the draft's work before its first proposal, for a request that is alone
        self._missed_s = 0.0  # that the last first proposal was waited for in vain; 0: it arrived
        self._last_works_s = deque([0.0], maxlen=_MAX_WORKS)  # 0: the first after a start take many times as long

    @property
    def _shares_device(self) -> bool:
        """Whether the draft's work takes time from the target's."""
        return self._cores is not None or self._draft.shares_gpu

    @property
    def _proposal_timeout_s(self) -> float:
        """How long the target waits for a first proposal."""
        return max(_PROPOSAL_TIMEOUT_RATIO * max(self._last_works_s), _MIN_PROPOSAL_TIMEOUT_S)

    def may_ask(self, request: GenerationRequest, num_sharing: int) -> bool:
        """Whether the draft may be asked to follow soon; `num_sharing` requests are on the target."""
        mode = request.speculation
        if self._draft.channel is None or mode is SpeculationMode.OFF:
            return False
        return mode is not SpeculationMode.AUTO or num_sharing == 1 or not self._shares_device

    def should_ask_early(self, request: GenerationRequest, num_sharing: int) -> bool:
        """Whether to ask before anything is known of the answer."""
        if self._draft.shares_gpu or not self.may_ask(request, num_sharing):
            return False
        if request.speculation is not SpeculationMode.AUTO or self._cores is None:
            return True
        # The first token comes with the prompt.
        rest = self._lengths.expected_rest(request, 1, (request.max_tokens or math.inf) - 1)
        return rest > 0 and rest * self._saved_s > _CAUTION * self._work_s

    def ask(self, request_id: str, tower: TowerMemory | None = None, max_lead: int = 0) -> None:
        """Ask the draft to follow; `tower` is our vision tower's output, None if the draft must run its own.

        The draft may propose `max_lead` tokens before it knows the first one.
        """
        self._asked.add(request_id)
        follow = Follow(request_id=request_id, max_lead=max_lead)
        self._draft.send(follow, () if tower is None else (tower.descriptor,))
        if self._cores is not None:
            # The shortest: after a long video, a short one must not wait for half of the cores.
            self._cores.lend(min(self._last_works_s))

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
        request.speculation.replan(costs, take_turns=self._draft.shares_gpu)
        plan = request.speculation.plan
        saved_s = token_s * (1.0 - 1.0 / max(plan.speedup, 1.0))
        if num_sharing == 1:
            self._saved_s = saved_s if math.isinf(self._saved_s) else _mean(self._saved_s, saved_s)
        if plan.is_off:
            return False
        if not is_asked and self._pays(request, saved_s, num_sharing):
            self.ask(request.request_id, request.tower)
            request.tower = None
            if self._draft.shares_gpu and num_sharing == 1:  # else other streams would stand still
                request.speculation.expected_until = time.monotonic() + self._proposal_timeout_s
        return self.is_asked(request.request_id)

    def observe(self, prepare_s: float) -> None:
        """Count the draft's work before its first proposal for a request. A shorter time counts at once: the first one
        after a start takes many times as long as others.
        """
        self._work_s = min(prepare_s, _mean(self._work_s or prepare_s, prepare_s))
        self._last_works_s.append(prepare_s)
        self._missed_s = 0.0

    def observe_timeout(self) -> None:
        """A first proposal did not arrive in time. If it happens twice in a row, the draft's work counts as long as
        the wait was; once does not count, since the first request after a start takes many times as long as others.
        """
        self._work_s = max(self._work_s, self._missed_s)
        self._missed_s = self._proposal_timeout_s

    def end(self, request: TargetRequest) -> None:
        """Count the length of a complete answer and release its request.

        An answer without the draft says nothing of its work: the figure fades, or a slow hour would rule the draft out
        for good.
        """
        if not self.is_asked(request.request_id):
            self._work_s *= 1.0 - FADE
        self.release(request.request_id)
        self._lengths.add(request.asked, request.num_committed)

    def release(self, request_id: str) -> None:
        """The request needs no more proposals."""
        self._asked.discard(request_id)

    def forget(self) -> None:
        """Start again with a new draft, which has not been asked anything yet."""
        self._asked.clear()

    def _pays(self, request: TargetRequest, saved_s: float, num_sharing: int) -> bool:
        """Whether to save `saved_s` for every token to come is worth the draft's work."""
        if request.num_left < 2:  # the last token takes a forward in any case
            return False
        if request.speculation.mode is not SpeculationMode.AUTO or not self._shares_device:
            return True
        rest = self._lengths.expected_rest(request.asked, request.num_committed, request.num_left)
        return rest * saved_s > (self._work_s if num_sharing == 1 else request.prepare_s * num_sharing)


def _mean(before: float, new: float) -> float:
    """The running mean of a value and those before it."""
    return _MEMORY * before + (1 - _MEMORY) * new
