"""What an engine is and what a caller gets back from it. What is asked is declared in `vidspec_models.request`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from vidspec_models.request import GenerationRequest, SpeculationMode


class FinishReason(StrEnum):
    """Why a generation ended: end-of-sequence or stop string, token limit, or cancelled by the client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The prompt fits its context; always the first event. `queue_s` ran until the target took it up."""

    request_id: str
    prompt_tokens: int
    video_tokens: int
    cached_tokens: int = 0  # of the prompt, whose keys and values were there already
    queue_s: float = 0.0
    prepare_s: float = 0.0  # from there until now


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Newly committed text; `num_tokens` tokens were committed since the last delta (text may be empty)."""

    text: str
    num_tokens: int
    ids: tuple[int, ...] = ()  # the tokens themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What speculation did for one request.

    Acceptance is defined here, for answers and metrics alike: a draft token is *judged* when the target has compared
    it with its own choice. Those are the accepted ones and the first that is rejected; what follows a rejection was
    never judged. The acceptance rate is accepted over judged tokens, 0 when nothing was judged.
    """

    mode: SpeculationMode = SpeculationMode.OFF
    num_drafts: int = 0  # verifications that judged at least one draft token
    num_draft_tokens: int = 0  # judged
    num_accepted_tokens: int = 0
    num_verifications: int = 0  # target forwards that committed tokens of this request
    draft_video_tokens: int = 0  # visual tokens the draft saw

    @property
    def acceptance_rate(self) -> float:
        """Accepted over judged draft tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_accepted_tokens(self) -> float:
        """Accepted draft tokens per verification (without the target's own token)."""
        return self.num_accepted_tokens / self.num_verifications if self.num_verifications else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Always the last event of a generation that did not fail."""

    finish_reason: FinishReason
    completion_tokens: int
    speculation: SpeculationStats
    queue_s: float  # submit until the target took the request up
    prefill_s: float  # from there until the first token was committed


GenerationEvent = Accepted | TextDelta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about the loaded models, known once the workers are ready."""

    model: str  # served name
    draft_model: str | None
    context_length: int  # tokens, prompt and completion together
    default_num_frames: int  # frames sampled when the client names neither fps nor num_frames
    default_max_tokens: int
    devices: dict[str, str]  # role -> device, e.g. {"target": "cuda:0", "draft": "cuda:1"}
    versions: dict[str, str]


class WorkerState(StrEnum):
    """Life of one worker process."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A snapshot for the health and metrics routes."""

    workers: dict[str, WorkerState]
    num_running: int
    num_waiting: int

    @property
    def is_ready(self) -> bool:
        """The target can take requests; a missing draft costs speed only."""
        return self.workers.get("target") is WorkerState.READY


class Engine(Protocol):
    """Turns requests into event streams; started and closed by its owner."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded models; raises EngineDead before all workers were ready once."""
        ...

    def status(self) -> EngineStatus:
        """The workers' states and the load, without waiting."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield Accepted, then TextDelta events, then Finished.

        Closing the generator early cancels the request on every worker. Raises, before or instead of
        Finished: ContextLengthExceeded, GenerationFailed, EngineDead.
        """
        ...
