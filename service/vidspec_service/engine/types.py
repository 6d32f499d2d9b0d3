"""The engine's vocabulary: what a request asks, what a caller gets back. Plain frozen dataclasses, numpy at most."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from vidspec_models.compression.dycoke import DyCoke as DyCoke  # settings make one, and import no model code


class SpeculationMode(StrEnum):
    """How draft and target share the work; the text is the same in every mode."""

    AUTO = "auto"
    PARALLEL = "parallel"
    SERIAL = "serial"
    OFF = "off"


class Compression(StrEnum):
    """Lossy target-side token compression; an explicit opt-in."""

    NONE = "none"
    DYCOKE = "dycoke"


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
class VideoInput:
    """Chosen frames of one clip, as the model will see them, and where they came from."""

    frames: NDArray[np.uint8]  # [T, H, W, 3] RGB
    timestamps_s: tuple[float, ...]  # [T] seconds from the clip's start
    source_indices: tuple[int, ...]  # [T] index of each frame in the source
    source_fps: float  # average frame rate of the source, frames per second
    source_num_frames: int
    duration_s: float
    key: str | None = None  # content hash and sampling, and whose it is: equal keys mean equal frames


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. `num_videos` of the request's videos, in order, stand before the turn's text."""

    role: str  # "system" | "user" | "assistant"
    text: str
    num_videos: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The law a token is drawn from. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0  # 64-bit; the caller draws one at random when the client sent none


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Everything the engine needs to answer once. Same request and seed: same text in every mode."""

    request_id: str
    messages: tuple[ChatMessage, ...]
    videos: tuple[VideoInput, ...] = ()
    max_tokens: int | None = None  # None: whatever the context leaves, bounded by EngineInfo.default_max_tokens
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    speculation: SpeculationMode = SpeculationMode.AUTO
    compression: Compression = Compression.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The prompt fits and has been accepted; always the first event."""

    prompt_tokens: int
    video_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Newly committed text; `num_tokens` tokens were committed since the last delta (text may be empty)."""

    text: str
    num_tokens: int
    ids: tuple[int, ...] = ()  # the tokens themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What speculation did for one request. Rates are 0 when nothing was proposed."""

    mode: SpeculationMode = SpeculationMode.OFF
    num_drafts: int = 0  # verification forwards that had at least one proposal
    num_draft_tokens: int = 0  # proposed tokens that the target judged
    num_accepted_tokens: int = 0
    num_verifications: int = 0  # target forwards that committed tokens of this request
    draft_video_tokens: int = 0  # visual tokens the draft saw

    @property
    def acceptance_rate(self) -> float:
        """Accepted over judged proposals."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_accepted_tokens(self) -> float:
        """Accepted proposals per verification forward (without the target's own token)."""
        return self.num_accepted_tokens / self.num_verifications if self.num_verifications else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Always the last event of a generation that did not fail."""

    finish_reason: FinishReason
    completion_tokens: int
    speculation: SpeculationStats
    queue_s: float  # submit until the target began its prefill
    prefill_s: float  # until the first token was committed


GenerationEvent = Started | TextDelta | Finished


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
    """What the engine is built from; `settings.py` makes one."""

    target: WorkerConfig
    draft: WorkerConfig | None = None  # None: the target alone
    speculation: SpeculationMode = SpeculationMode.AUTO  # for requests that leave the choice to the server
    served_name: str | None = None  # None: the target's own name
    max_running: int = 16
    max_context: int | None = None
    kv_tokens: int = 65536  # keys and values of so many tokens, prompts and answers of all requests together
    default_max_tokens: int = 256
    encoded_bytes: int = 256 * 2**20  # features of videos seen lately, in each worker
    prefill_chunk: int = 512  # prompt rows per forward between two decoding steps
    preservation: Preservation = Preservation.HIPPO
    dycoke: DyCoke = field(default_factory=DyCoke)  # of requests that ask for it
    prune_ratio: float = 0.9  # share of the video's tokens that the draft does not see, in [0, 0.99]
    start_timeout_s: float = 300.0
    log_level: str = "info"  # of the workers, which write to the same stderr
    log_format: str = "text"
    silence_s: float = 30.0  # a ready worker without a heartbeat for this long has hung


class WorkerState(StrEnum):
    """Life of one worker process."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
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
