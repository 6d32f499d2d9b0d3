"""What a run of `bench speed` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from vidspec_models.request import SamplingParams, SpeculationMode
from vidspec_service.bench.common.options import number, option


class Mode(StrEnum):
    """The ways to answer that are compared. `hf` is stock transformers on the target alone, the peer."""

    HF = "hf"
    OFF = "off"
    SERIAL = "serial"
    PARALLEL = "parallel"
    AUTO = "auto"

    @property
    def speculation(self) -> SpeculationMode:
        """What the engine is asked for; `hf` is not the engine."""
        return SpeculationMode.OFF if self is Mode.HF else SpeculationMode(self.value)

    @property
    def needs_draft(self) -> bool:
        return self not in (Mode.HF, Mode.OFF)

    @property
    def roles(self) -> tuple[str, ...]:
        """The workers of the engine that are at work."""
        return ("target", "draft") if self.needs_draft else ("target",)


BASELINE = Mode.OFF


class Task(StrEnum):
    """What is asked about each clip."""

    CAPTION = "caption"
    QA = "qa"
    MIXED = "mixed"
    SYNTHETIC = "synthetic"  # numbered prompts of random models; not for others


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions:
    """Random models of a pair's real shapes, and the acceptance that is imposed on them."""

    shape: str = "llava-onevision-7b+0.5b"
    acceptance: float = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """By default greedy captions, one request at a time."""

    num_prompts: int = number(24, "--prompts", "test clips")
    task: Task = option(  # noqa: RUF009
        Task.CAPTION,
        "--task",
        "default %(default)s",
        choices=[task.value for task in Task if task is not Task.SYNTHETIC],
    )
    modes: tuple[Mode, ...] = option(
        tuple(Mode), "--modes", "only these (default all)", nargs="+", choices=[mode.value for mode in Mode]
    )
    max_tokens: int = number(160, "--max-tokens", "per answer")
    sampling: SamplingParams = field(default_factory=SamplingParams)
    concurrency: int = number(1, "--concurrency", "requests at once")
    synthetic: SyntheticOptions | None = None
