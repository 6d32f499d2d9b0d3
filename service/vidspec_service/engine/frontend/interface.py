"""What an engine is to whoever asks it: `Engine`, the facts about it and the state it is in."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tokenizers import Tokenizer

from vidspec_models.request import Compression, GenerationRequest, ToolFormat
from vidspec_models.step_path import StepPath
from vidspec_service.engine.kv_budget import WorkerMemory
from vidspec_service.engine.types import GenerationEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about the loaded models, known once the workers are ready."""

    model_names: tuple[str, ...]  # that clients may use
    root: str  # the hub id, or the folder's name
    draft_model: str | None
    context_length: int  # tokens, prompt and completion together
    default_num_frames: int  # frames sampled when the client names neither fps nor num_frames
    default_max_tokens: int
    devices: dict[str, str]  # role -> device, e.g. {"target": "cuda:0", "draft": "cuda:1"}
    versions: dict[str, str]
    max_frames: int | None = None  # of a video, where the target's checkpoint says what it was made for
    default_sampling: dict[str, float] = field(default_factory=dict)  # SamplingParams of requests that do not say
    tool_format: ToolFormat = ToolFormat.NONE  # what the target's chat template makes of tools
    can_merge_frames: bool = False  # the target's tower can, which `earlytom` needs
    is_batch_invariant: bool = True  # of the target's rows; if not, speculation may change text at near-ties
    kv_cache_tokens: dict[str, int] = field(default_factory=dict)  # role -> tokens it has room for
    memory: dict[str, WorkerMemory] = field(default_factory=dict)  # of roles on CUDA

    @property
    def model(self) -> str:
        """The name that clients are told."""
        return self.model_names[0]

    def why_not(self, compression: Compression) -> str | None:
        """Why the target cannot compress like this, and what to do; None where it can."""
        if compression is Compression.EARLYTOM and not self.can_merge_frames:
            return "This model's vision tower cannot merge frames, which earlytom needs; vidcom2 needs nothing of it."
        return None


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
    step_paths: dict[str, StepPath] = field(default_factory=dict)  # role -> how its steps are computed
    outage_s: float = 0.0  # that there was no target, since there was the first, all times together

    @property
    def is_ready(self) -> bool:
        """The target can take requests; a missing draft costs speed only."""
        return self.workers.get("target") is WorkerState.READY

    @property
    def warnings(self) -> list[str]:
        """What costs a factor of speed, and should not."""
        return [
            f"the {role} is several times slower than it should be: {path.fallback}"
            for role, path in self.step_paths.items()
            if path.fallback
        ]


class Engine(Protocol):
    """Turns requests into event streams; started and closed by its owner."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded models; raises EngineDead before all workers were ready once."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The models' common one; raises EngineDead before all workers were ready once."""
        ...

    def status(self) -> EngineStatus:
        """The workers' states and the load, without waiting."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield Accepted, then TextDelta events, then Finished; of all `request.n` answers, as they come.

        Closing the generator early cancels the request on every worker. Raises, before or instead of
        Finished: ContextLengthExceeded, InvalidRequest (for tokens that the model does not have), GenerationFailed,
        EngineDead.
        """
        ...
