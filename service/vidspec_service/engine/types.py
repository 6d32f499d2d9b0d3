"""The engine's vocabulary: what it is built from and what a caller gets back. Plain frozen dataclasses.

What is asked is declared in `vidspec_models.request`, for all processes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from vidspec_models.compression.dycoke import DyCoke as DyCoke  # settings make one, and import no model code
from vidspec_models.request import GenerationRequest, SpeculationMode


class Preservation(StrEnum):
    """Which of a video's tokens the draft sees (docs/methods.md); speed only."""

    HIPPO = "hippo"
    SPECVLM = "specvlm"
    ATTENTION = "attention"
    UNBIASED = "unbiased"
    UNIFORM = "uniform"
    RANDOM = "random"
    TTM = "ttm"
    NONE = "none"
    BLIND = "blind"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker's model, device and share of the CPU. "auto" is resolved inside the worker, which sees the device."""

    model: str  # "bundled", a folder or a hub id
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None  # None: the engine's choice


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine is built from; `settings` makes one. Workers are sent it as it is."""

    target: WorkerConfig
    draft: WorkerConfig | None = None  # None: the target alone
    speculation: SpeculationMode = SpeculationMode.AUTO  # for requests that leave the choice to the server
    served_name: str | None = None  # None: the target's own name
    max_running: int = 16
    max_context: int | None = None
    kv_tokens: int = 65536  # keys and values of so many tokens, prompts and answers of all requests together
    default_max_tokens: int = 256  # of requests that name no limit
    encoded_bytes: int = 256 * 2**20  # features of videos seen lately, in each worker
    prefill_chunk: int = 512  # prompt rows per forward between two decoding steps
    preservation: Preservation = Preservation.HIPPO  # both workers must know: the target measures for it
    dycoke: DyCoke = field(default_factory=DyCoke)  # of requests that ask for it
    prune_ratio: float = 0.9  # share of the video's tokens that the draft does not see, in [0, 0.99]
    start_timeout_s: float = 300.0
    log_level: str = "info"  # of the workers, which write to the same stderr
    log_format: str = "text"  # "json": one object a line, as the API's
    silence_s: float = 30.0  # a ready worker without a heartbeat for this long has hung


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
