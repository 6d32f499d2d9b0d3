"""Options of `bench speed`, and its prompts about clips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from vidspec_models.bundled.questions import questions
from vidspec_models.bundled.scene import TEST_SEEDS, sample_scene
from vidspec_models.request import GenerationRequest, SpeculationMode, Video
from vidspec_models.synthetic.recipe import SHAPES, prompt_text
from vidspec_service.bench.common.options import SamplingOptions, choices, number, option
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, about_video, scene_video


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
    SYNTHETIC = "synthetic"  # numbered prompts, for random models only


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions(SamplingOptions):
    """By default greedy captions, one request at a time."""

    num_prompts: int = number(24, "--prompts", "number of test clips")
    task: SpeedTask = option(  # noqa: RUF009
        SpeedTask.CAPTION,
        "--task",
        "what to ask (default %(default)s)",
        choices=[task.value for task in SpeedTask if task is not SpeedTask.SYNTHETIC],
    )
    modes: tuple[Mode, ...] = choices(Mode, "--modes", "modes to compare (default all)")
    max_tokens: int = number(160, "--max-tokens", "maximum tokens per answer")
    concurrency: int = number(1, "--concurrency", "requests at once")
    shape: str = option(  # this and `acceptance` apply to random models only
        _SHAPE, "--shape", f"shape of random models (default {_SHAPE})", choices=list(SHAPES), default=None
    )
    acceptance: float = option(
        0.8, "--alpha", "acceptance of random models (default 0.8)", type=float, metavar="A", default=None
    )

    @property
    def is_synthetic(self) -> bool:
        """Whether the run uses random models of a real pair's shapes instead of checkpoints."""
        return self.task is SpeedTask.SYNTHETIC


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One question about one clip."""

    index: int
    text: str
    video: Video

    def request(self, mode: Mode, group: int, options: SpeedOptions) -> GenerationRequest:
        """The request for a mode. Modes differ only in speculation; each prompt has a seed of its own."""
        return GenerationRequest(
            request_id=f"{mode}-{group}-{self.index}",
            turns=about_video(self.text),
            videos=(self.video,),
            max_tokens=options.max_tokens,
            sampling=options.sampling(self.index),
            speculation=mode.speculation,
        )


def make_prompts(task: SpeedTask, indices: range) -> Iterator[BenchPrompt]:
    """Prompt i is about test scene i; questions rotate through the types that apply. Random models see no scene."""
    for index in indices:
        yield BenchPrompt(index=index, text=_text(task, index), video=scene_video(TEST_SEEDS[index]))


def _text(task: SpeedTask, index: int) -> str:
    if task is SpeedTask.SYNTHETIC:
        return prompt_text(index)
    if task is SpeedTask.CAPTION or (task is SpeedTask.MIXED and index % 2 == 0):
        return CAPTION_PROMPT
    asked = questions(sample_scene(TEST_SEEDS[index]))
    return asked[index % len(asked)].text
