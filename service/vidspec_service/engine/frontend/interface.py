"""The interface of an engine: `Engine`, the facts about its models (`EngineInfo`) and its state (`EngineStatus`)."""

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

    model_names: tuple[str, ...]  # names of the model that clients may use
    root: str  # the hub id, or the folder's name
    draft_model: str | None
    context_length: int  # tokens, prompt and completion together
    default_num_frames: int  # frames sampled when the client names neither fps nor num_frames
    default_max_tokens: int
    devices: dict[str, str]  # role -> device, e.g. {"target": "cuda:0", "draft": "cuda:1"}
    versions: dict[str, str]
    max_frames: int | None = None  # most frames per video that the target was made for, if its checkpoint says so
    default_sampling: dict[str, float] = field(default_factory=dict)  # SamplingParams of requests that set none
    tool_format: ToolFormat = ToolFormat.NONE  # what the target's chat template makes of tools
    can_merge_frames: bool = False  # whether the target's vision tower can merge frames, as `earlytom` needs
    is_batch_invariant: bool = True  # whether the target's rows are; if not, speculation may change text at near-ties
    kv_cache_tokens: dict[str, int] = field(default_factory=dict)  # role -> tokens that its KV cache can hold
    memory: dict[str, WorkerMemory] = field(default_factory=dict)  # role -> measured memory

    @property
    def model(self) -> str:
        """The name that clients are told."""
        return self.model_names[0]

    def why_not(self, compression: Compression) -> str | None:
        """Why the target cannot use this compression, and what to use instead; None if it can."""
        if compression is Compression.EARLYTOM and not self.can_merge_frames:
            return "This model's vision tower cannot merge frames, which earlytom needs; use vidcom2 instead."
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
    outage_s: float = 0.0  # total seconds without a target since the first one was ready

    @property
    def is_ready(self) -> bool:
        """The target can take requests; a missing draft costs speed only."""
        return self.workers.get("target") is WorkerState.READY

    @property
    def warnings(self) -> list[str]:
        """Messages about workers that are several times slower than they should be."""
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

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that both models share; raises EngineDead before all workers were ready once."""

    def status(self) -> EngineStatus:
        """The workers' states and the load, without waiting."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield PromptReady, then TextDelta events, then Finished, for all `request.n` answers, interleaved.

        Closing the generator early cancels the request on every worker. Raises, before or instead of
        Finished: ContextLengthExceeded, InvalidRequest (for tokens that the model does not have, or a conversation
        that its template refuses), GenerationFailed, EngineDead.
        """
