"""Following: which requests the draft is asked to follow, and when.

To follow, the draft runs its own tower over the video and prefills what it sees of it. Where both models compute on
the same cores, that work is taken from requests that wait for theirs. So in `auto` it is asked for at once only for
a request that has the cores to itself, and for others when the gain over the rest of the answer exceeds the work,
which is put at what the target's own preparation took. The modes that force speculation ask at once.
"""

from __future__ import annotations

from vidspec_service.engine.draft_link import DraftLink
from vidspec_service.engine.messages import Follow, Generate, Release
from vidspec_service.engine.policy import StepCosts
from vidspec_service.engine.running import Running
from vidspec_service.engine.types import SpeculationMode

_FIRST_GUESS = 128.0  # tokens of an answer, before there was one
_MEMORY = 0.9  # weight of the answers before the last one


class Following:
    """What the connected draft was asked; tells it through the link."""

    def __init__(self, draft: DraftLink, *, shares_cores: bool) -> None:
        self._draft = draft
        self._shares_cores = shares_cores
        self._asked: set[str] = set()
        self._answer_tokens = _FIRST_GUESS

    def begin(self, request: Generate, *, num_sharing: int) -> None:
        """A request is about to be prepared, `num_sharing` of them, it included, being anywhere on the target."""
        mode = SpeculationMode(request.speculation)
        is_forced = mode not in (SpeculationMode.OFF, SpeculationMode.AUTO)
        if is_forced or (mode is SpeculationMode.AUTO and self._is_free(num_sharing)):
            self._ask(request.request_id)

    def follows(self, running: Running, costs: StepCosts, *, num_sharing: int) -> bool:
        """Plan how far the draft may run ahead of a decoding request; True if it follows, asked now if need be."""
        token_s = costs.verification_s(1)
        is_asked = running.request_id in self._asked
        if not is_asked and not self._pays(running, token_s, num_sharing):
            return False  # not even proposals that take no time would pay: no plan need be searched
        running.speculation.replan(costs)
        plan = running.speculation.plan
        if plan.is_off:
            return False
        if not is_asked and self._pays(running, token_s * (1.0 - 1.0 / max(plan.speedup, 1.0)), num_sharing):
            self._ask(running.request_id)
        return running.request_id in self._asked

    def _pays(self, running: Running, saved_s: float, num_sharing: int) -> bool:
        """Whether the draft's work is worth `saved_s` for every token to come."""
        if running.speculation.mode is not SpeculationMode.AUTO or self._is_free(num_sharing):
            return True
        rest = min(expected_rest(self._answer_tokens, running.num_committed), running.sequence.num_left)
        return rest * saved_s > running.prepare_s * num_sharing

    def ended(self, running: Running) -> None:
        """An answer is complete."""
        self.release(running.request_id)
        self._answer_tokens = _MEMORY * self._answer_tokens + (1 - _MEMORY) * running.num_committed

    def release(self, request_id: str) -> None:
        """The request needs no more proposals."""
        self._asked.discard(request_id)
        self._draft.send(Release(request_id=request_id))

    def forget(self) -> None:
        """Another draft, which was asked nothing yet."""
        self._asked.clear()

    def _is_free(self, num_sharing: int) -> bool:
        return num_sharing == 1 or not self._shares_cores

    def _ask(self, request_id: str) -> None:
        if self._draft.channel is not None:
            self._asked.add(request_id)
            self._draft.send(Follow(request_id=request_id))


def expected_rest(answer_tokens: float, num_committed: int) -> float:
    """Tokens still to come of an answer: up to the usual length, and beyond it as many again as it is over."""
    return abs(answer_tokens - num_committed)
