"""Options of `bench speed`, and its requests about clips."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from vidspec_models.bundled.questions import questions
from vidspec_models.bundled.scene import TEST_SEEDS, sample_scene
from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_models.synthetic.recipe import SHAPES, prompt_text
from vidspec_service.bench.common.options import SamplingOptions, choices, number, option
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, scene_request
from vidspec_service.errors import ConfigError


class Mode(StrEnum):
    """The modes that are compared. `hf` is the peer: stock transformers with the target alone."""

    HF = "hf"
    OFF = "off"
    SERIAL = "serial"
    PARALLEL = "parallel"
    AUTO = "auto"

    @property
    def speculation(self) -> SpeculationMode:
        """The engine's speculation mode; `hf` does not use the engine."""
        return SpeculationMode.OFF if self is Mode.HF else SpeculationMode(self.value)

    @property
    def needs_draft(self) -> bool:
        return self not in (Mode.HF, Mode.OFF)


BASELINE = Mode.OFF
_SHAPE = "llava-onevision-7b+0.5b"


class SpeedTask(StrEnum):
    """What is asked about each clip."""

    CAPTION = "caption"
    QA = "qa"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions(SamplingOptions):
    """By default greedy captions, one request at a time."""

    num_prompts: int = number(24, "--prompts", "number of test clips")
    task: SpeedTask = option(  # noqa: RUF009
        SpeedTask.CAPTION,
        "--task",
        "what to ask (default %(default)s)",
        choices=[task.value for task in SpeedTask],
    )
    modes: tuple[Mode, ...] = choices(Mode, "--modes", "modes to compare (default all)")
    max_tokens: int = number(160, "--max-tokens", "maximum tokens per answer")
    concurrency: int = number(1, "--concurrency", "requests at once")
    is_synthetic: bool = option(
        False,
        "--random-weights",
        "measure without a checkpoint: random models of real shapes, with the acceptance that --alpha sets",
        action="store_true",
    )
    shape: str = option(  # this and `acceptance` apply to random models only
        _SHAPE, "--shape", f"shape of random models (default {_SHAPE})", choices=list(SHAPES), default=None
    )
    acceptance: float = number(0.8, "--alpha", "acceptance of random models", "A", type=float, default=None)

    def __post_init__(self) -> None:
        if not self.is_synthetic:
            return
        if not 0 <= self.acceptance <= 1:
            raise ConfigError("--alpha must be a probability, from 0 to 1")
        if self.temperature > 0:
            raise ConfigError("random models are compared greedily: leave out --temperature")
        if Mode.OFF not in self.modes:
            raise ConfigError("--random-weights needs mode off: the oracle proposes what the target alone answers")

    @property
    def task_name(self) -> str:
        """The task as a report names it."""
        return "synthetic" if self.is_synthetic else self.task

    def request(self, mode: Mode, group: int, prompt: int) -> GenerationRequest:
        """The request of this number, about the test scene of this number; modes differ only in speculation.

        Each has a cache salt of its own: an n-gram draft repeats earlier answers, and those of all modes are the same.
        """
        request = scene_request(f"{mode}-{group}-{prompt}", prompt, self.max_tokens, self._text(prompt))
        return replace(request, sampling=self.sampling(prompt), speculation=mode.speculation, cache_salt=mode.value)

    def _text(self, prompt: int) -> str:
        """Questions rotate through the types that apply to the scene. Random models see no scene."""
        if self.is_synthetic:
            return prompt_text(prompt)
        if self.task is SpeedTask.CAPTION or (self.task is SpeedTask.MIXED and prompt % 2 == 0):
            return CAPTION_PROMPT
        asked = questions(sample_scene(TEST_SEEDS[prompt]))
        return asked[prompt % len(asked)].text
