"""The run of `bench structured`: every clip is asked about in every form and mode, in an order that rotates.

Each answer is judged against the scene that was rendered. A last pass, which is not timed, counts forced tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum

from llguidance import LLMatcher
from prometheus_client import CollectorRegistry

from vidspec_models.bundled.captions import fact_marks, parse_caption
from vidspec_models.bundled.description import DESCRIPTION_SCHEMA, parse_description
from vidspec_models.bundled.scene import TEST_SEEDS, sample_scene
from vidspec_models.request import GenerationRequest, Include, SamplingParams, SpeculationMode
from vidspec_service.bench.common.facts import alone_config
from vidspec_service.bench.common.options import number
from vidspec_service.bench.common.report import Tell
from vidspec_service.bench.common.samples import Sample, ask_engine
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, about_video, scene_video
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.types import TextDelta, TokenSource
from vidspec_service.errors import ConfigError
from vidspec_service.telemetry import Metrics

MODES = (SpeculationMode.OFF, SpeculationMode.PARALLEL)
_WARM_UP_CLIPS = 2


class Form(StrEnum):
    """What is asked about each clip, and what the answer must look like."""

    CAPTION = "caption"
    ANY_TEXT = "caption, any text"  # the same answer: what it costs more is the grammar's
    JSON = "JSON"

    @property
    def prompt(self) -> str:
        return "Describe the video as JSON." if self is Form.JSON else CAPTION_PROMPT

    @property
    def grammar(self) -> str | None:
        """As a request has it."""
        if self is Form.CAPTION:
            return None
        if self is Form.ANY_TEXT:
            return LLMatcher.grammar_from_regex(r"(?s:.*)")
        return LLMatcher.grammar_from_json_schema(json.dumps(DESCRIPTION_SCHEMA))


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOptions:
    """By default greedy."""

    num_clips: int = number(24, "--clips", "test clips")
    max_tokens: int = number(250, "--max-tokens", "per answer")
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def request(self, form: Form, mode: SpeculationMode, clip: int) -> GenerationRequest:
        """About the test clip of this number, with a seed of its own."""
        return GenerationRequest(
            request_id=f"{form}-{mode}-{clip}",
            turns=about_video(form.prompt),
            videos=(scene_video(TEST_SEEDS[clip]),),
            max_tokens=self.max_tokens,
            sampling=replace(self.sampling, seed=self.sampling.seed + clip),
            speculation=mode,
            grammar=form.grammar,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One form's answers, the same in every mode if `is_identical`."""

    samples: dict[SpeculationMode, Sequence[Sample]]
    num_valid: int  # can be read in full: a caption's sentences are known, JSON is of the schema
    num_right: int  # every fact of the scene is stated rightly
    num_forced: int  # tokens that the grammar left no choice about

    @property
    def is_identical(self) -> bool:
        return len({tuple(sample.ids for sample in samples) for samples in self.samples.values()}) == 1


def measure_structured(options: StructuredOptions, pair: EngineConfig, tell: Tell) -> dict[Form, Judged]:
    """Raises ConfigError and EngineError."""
    if pair.draft is None:
        raise ConfigError("parallel needs a draft model: name one with --draft-model")
    return asyncio.run(_measure(options, pair, tell))


async def _measure(options: StructuredOptions, pair: EngineConfig, tell: Tell) -> dict[Form, Judged]:
    async with AsyncExitStack() as stack:
        engines: dict[SpeculationMode, LocalEngine] = {}
        for mode, config in zip(MODES, (alone_config(pair), pair), strict=True):
            tell(f"loading the engine of {mode}", 0, 0)
            engines[mode] = await stack.enter_async_context(LocalEngine(config, Metrics(CollectorRegistry())))
        cases = [(form, mode) for form in Form for mode in MODES]
        found: dict[tuple[Form, SpeculationMode], list[Sample]] = {case: [] for case in cases}
        for clip in range(-_WARM_UP_CLIPS, options.num_clips):
            by = clip % len(cases)
            for form, mode in [*cases[by:], *cases[:by]]:
                tell(f"{form}, {mode}", max(clip, 0), options.num_clips)
                sample = await ask_engine(engines[mode], options.request(form, mode, clip))
                if clip >= 0:
                    found[form, mode].append(replace(sample, mode=mode, group=clip, prompt=clip))
        judged = {}
        for form in Form:
            texts, num_forced = [], 0
            for clip in range(options.num_clips):
                tell(f"{form}: judging", clip, options.num_clips)
                text, forced = await _said(engines[SpeculationMode.OFF], options, form, clip)
                texts.append(text)
                num_forced += forced
            judged[form] = judge(form, {mode: found[form, mode] for mode in MODES}, texts, num_forced)
        return judged


async def _said(engine: LocalEngine, options: StructuredOptions, form: Form, clip: int) -> tuple[str, int]:
    """The answer's text, and how many of its tokens were forced."""
    request = options.request(form, SpeculationMode.OFF, clip)
    request = replace(request, request_id=f"{request.request_id}-told", include=frozenset({Include.TOKEN_DETAILS}))
    text, num_forced = "", 0
    async for event in engine.generate(request):
        if isinstance(event, TextDelta):
            text += event.text
            num_forced += sum(detail.source is TokenSource.GRAMMAR for detail in event.details)
    return text, num_forced


def judge(
    form: Form, samples: dict[SpeculationMode, Sequence[Sample]], texts: Sequence[str], num_forced: int
) -> Judged:
    """What is true of the texts, one of each clip in order."""
    read = parse_description if form is Form.JSON else parse_caption
    stated = [read(text) for text in texts]
    marks = [fact_marks(sample_scene(TEST_SEEDS[clip]), facts) for clip, facts in enumerate(stated)]
    return Judged(
        samples=samples,
        num_valid=sum(facts is not None for facts in stated),
        num_right=sum(all(is_right for _, is_right in clip) for clip in marks),
        num_forced=num_forced,
    )
