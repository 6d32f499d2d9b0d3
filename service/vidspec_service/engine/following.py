"""Following: which requests the draft is asked to follow, and when.

To follow, the draft runs its own tower over the video and prefills what it sees of it. Where both models compute on
the same cores, that work is taken from requests that wait for theirs. So in `auto` it is asked for at once only for
a request that has the cores to itself, and for others when the gain over the rest of the answer exceeds the work,
which is put at what the target's own preparation took. The modes that force speculation ask at once.
"""

from __future__ import annotations

from vidspec_service.engine.draft_link import DraftLink
from vidspec_service.engine.messages import Follow, Generate, Release
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

    def follows(self, running: Running, token_s: float, *, num_sharing: int) -> bool:
        """Whether the draft follows a decoding request, asked now if need be.

        `token_s` is what the target alone takes for one of its tokens.
        """
        if running.request_id not in self._asked:
            speculation = running.speculation
            rest = min(expected_rest(self._answer_tokens, running.num_committed), running.sequence.num_left)
            gain_s = rest * token_s * (1.0 - 1.0 / speculation.plan.speedup) if speculation.plan.speedup > 0 else 0.0
            is_forced = speculation.mode is not SpeculationMode.AUTO
            if is_forced or self._is_free(num_sharing) or gain_s > running.prepare_s * num_sharing:
                self._ask(running.request_id)
        return running.request_id in self._asked

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
