"""The run of `bench compression`: one child process after another, each with one configuration and the same clips."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from vidspec_models.bundled.scene import TEST_SEEDS
from vidspec_models.loading.spec import ModelSpec
from vidspec_service.bench.common.child import Child
from vidspec_service.bench.common.facts import Placement
from vidspec_service.bench.common.options import count, number, option
from vidspec_service.bench.common.report import Row, Tell
from vidspec_service.bench.compression.scoring import Score
from vidspec_service.engine.config import DyCoke


class Method(StrEnum):
    """How much of DyCoke: nothing, temporal merging of the prompt, or hiding keys and values while decoding, too."""

    NONE = "none"
    TTM = "ttm"
    DYCOKE = "dycoke"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One line of the table."""

    method: Method
    frames: int
    dycoke: DyCoke  # both ratios are 0 for `none`, the second one for `ttm`

    @property
    def label(self) -> str:
        return self.method if self.method is Method.NONE else f"{self.method} K={self.dycoke.merge_ratio:g}"


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 < value <= 0.99:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 0.99, not {text}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionOptions:
    """By default the paper's parameters."""

    num_clips: int = number(24, "--clips", "test clips")
    frames: tuple[int, ...] = option(
        (16, 64), "--frames", "per clip (default 16 64)", type=count, nargs="+", metavar="N"
    )
    ratios: tuple[float, ...] = option(
        (0.3, 0.5, 0.7), "--ratios", "(default 0.3 0.5 0.7)", type=_ratio, nargs="+", metavar="K"
    )
    dycoke: DyCoke = field(default_factory=DyCoke)  # L and P
    max_tokens: int = number(160, "--max-tokens", "per caption")

    def configurations(self) -> list[Configuration]:
        """For each number of frames the baseline first."""
        off = replace(self.dycoke, merge_ratio=0.0, hide_ratio=0.0)
        kinds = [(Method.NONE, off)]
        kinds += [(Method.TTM, replace(off, merge_ratio=ratio)) for ratio in self.ratios]
        kinds += [(Method.DYCOKE, replace(self.dycoke, merge_ratio=ratio)) for ratio in self.ratios]
        return [
            Configuration(method=method, frames=frames, dycoke=dycoke)
            for frames in self.frames
            for method, dycoke in kinds
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One configuration; clips in the same order everywhere."""

    configuration: Configuration
    captions: Sequence[Row]  # of `CompressedTarget.describe`
    questions: Sequence[Score]

    def scores(self) -> list[Score]:
        """Per clip, questions and caption facts together."""
        return [caption["score"] + asked for caption, asked in zip(self.captions, self.questions, strict=True)]


def measure(options: CompressionOptions, spec: ModelSpec, threads: int, tell: Tell) -> tuple[list[Measured], Placement]:
    """Everything that was seen, and where the model ran. Raises ConfigError with a child's words."""
    from vidspec_service.bench.compression.target import CompressedTarget  # torch

    configurations, seeds = options.configurations(), TEST_SEEDS[: options.num_clips]
    total = 2 * len(seeds) * len(configurations)
    found, placement, done = [], None, 0
    for configuration in configurations:
        name, frames = f"{configuration.label}, {configuration.frames} frames", configuration.frames
        captions, questions = list[Row](), list[Score]()
        with Child(CompressedTarget, spec, threads, configuration.dycoke, options.max_tokens) as child:
            placement = child.ask(CompressedTarget.placement)
            for seed in seeds:
                tell(f"{name}: captions", done + len(captions), total)
                captions.append(child.ask(CompressedTarget.describe, seed, frames))
            done += len(captions)
            for seed in seeds:  # after all captions, for it needs more memory
                tell(f"{name}: questions", done + len(questions), total)
                questions.append(child.ask(CompressedTarget.question, seed, frames))
            done += len(questions)
        found.append(Measured(configuration=configuration, captions=captions, questions=questions))
    assert placement is not None, "options without a configuration"
    return found, placement
