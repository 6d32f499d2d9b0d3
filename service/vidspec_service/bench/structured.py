"""`bench structured`: what a grammar costs and gains, and whether the JSON describes the clips correctly.

Every clip is asked about in every form and mode, in rotating order; each answer is compared with the rendered scene. A
last pass, which is not timed, counts forced tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from enum import StrEnum

from llguidance import LLMatcher
from rich.console import RenderableType

from vidspec_models.bundled.captions import fact_marks, parse_caption
from vidspec_models.bundled.description import DESCRIPTION_SCHEMA, parse_description
from vidspec_models.bundled.scene import TEST_SEEDS, sample_scene
from vidspec_models.request import GenerationRequest, Include, SpeculationMode
from vidspec_service.bench.common.environment import target_only_config
from vidspec_service.bench.common.generation import generate_sample, new_engine
from vidspec_service.bench.common.loops import rounds
from vidspec_service.bench.common.options import SamplingOptions, number
from vidspec_service.bench.common.report import OnProgress, Report, Row, column, table
from vidspec_service.bench.common.samples import Sample, acceptance, decode_rate, speedup
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, scene_request
from vidspec_service.engine.cgroups import num_cores
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.types import TextDelta, TokenSource
from vidspec_service.errors import ConfigError

MODES = (SpeculationMode.OFF, SpeculationMode.PARALLEL)
_WARM_UP_CLIPS = 2
_OFF, _PARALLEL = MODES


class Format(StrEnum):
    """What is asked about each clip, and the format of the answer."""

    CAPTION = "caption"
    ANY_TEXT = "caption, any text"  # same answer as CAPTION, so any extra time is the cost of the grammar
    JSON = "JSON"

    @property
    def prompt(self) -> str:
        return "Describe the video as JSON." if self is Format.JSON else CAPTION_PROMPT

    @property
    def grammar(self) -> str | None:
        """The grammar of a request; None for plain text."""
        if self is Format.CAPTION:
            return None
        if self is Format.ANY_TEXT:
            return LLMatcher.grammar_from_regex(r"(?s:.*)")
        return LLMatcher.grammar_from_json_schema(json.dumps(DESCRIPTION_SCHEMA))


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOptions(SamplingOptions):
    """By default greedy."""

    num_clips: int = number(24, "--clips", "number of test clips")
    max_tokens: int = number(250, "--max-tokens", "maximum tokens per answer")

    def request(self, form: Format, mode: SpeculationMode, clip: int) -> GenerationRequest:
        """A request about the test clip of this number, with a seed of its own.

        Each form has a cache salt of its own: an n-gram draft repeats earlier answers, and both captions are the same.
        """
        request = scene_request(f"{form}-{mode}-{clip}", clip, self.max_tokens, form.prompt)
        sampling = self.sampling(clip)
        return replace(request, sampling=sampling, speculation=mode, grammar=form.grammar, cache_salt=form.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatResult:
    """One form's answers in every mode; `is_identical` if all modes gave the same ids."""

    samples: dict[SpeculationMode, Sequence[Sample]]
    num_valid: int  # answers that parse in full: a caption of known sentences, or JSON that fits the schema
    num_right: int  # answers that state every fact of the scene correctly
    num_forced: int  # tokens that the grammar forced

    @property
    def is_identical(self) -> bool:
        return len({tuple(sample.ids for sample in samples) for samples in self.samples.values()}) == 1


def measure_structured(
    options: StructuredOptions, pair: EngineConfig, on_progress: OnProgress
) -> dict[Format, FormatResult]:
    """Raises ConfigError and EngineError."""
    if pair.draft is None:
        raise ConfigError("parallel needs a draft model: name one with --draft-model")
    return asyncio.run(_measure(options, pair, on_progress))


async def _measure(
    options: StructuredOptions, pair: EngineConfig, on_progress: OnProgress
) -> dict[Format, FormatResult]:
    async with AsyncExitStack() as stack:
        engines: dict[SpeculationMode, LocalEngine] = {}
        for mode, config in zip(MODES, (target_only_config(pair), pair), strict=True):
            on_progress(f"loading the engine of {mode}", 0, 0)
            engines[mode] = await stack.enter_async_context(new_engine(config))
        cases = [(form, mode) for form in Format for mode in MODES]
        found: dict[tuple[Format, SpeculationMode], list[Sample]] = {case: [] for case in cases}
        warm_up = itertools.product(range(-_WARM_UP_CLIPS, 0), cases)
        for clip, (form, mode) in itertools.chain(warm_up, rounds(range(options.num_clips), cases)):
            on_progress(f"{form}, {mode}", max(clip, 0), options.num_clips)
            sample = await generate_sample(engines[mode], options.request(form, mode, clip))
            if clip >= 0:
                found[form, mode].append(replace(sample, group=clip))
        results, num_asked = {}, len(found[cases[0]])
        for form in Format:
            answers = []
            for clip in range(num_asked):
                on_progress(f"{form}: scoring", clip, num_asked)
                answers.append(await _untimed_answer(engines[_OFF], options, form, clip))
            texts, num_forced = zip(*answers, strict=True)
            results[form] = score_texts(form, {mode: found[form, mode] for mode in MODES}, texts, sum(num_forced))
        return results


async def _untimed_answer(engine: LocalEngine, options: StructuredOptions, form: Format, clip: int) -> tuple[str, int]:
    """The answer's text, and the number of its forced tokens."""
    request = options.request(form, _OFF, clip)
    request = replace(request, request_id=f"{request.request_id}-untimed", include=frozenset({Include.TOKEN_DETAILS}))
    text, num_forced = "", 0
    async for event in engine.generate(request):
        if isinstance(event, TextDelta):
            text += event.text
            num_forced += sum(detail.source is TokenSource.GRAMMAR for detail in event.details)
    return text, num_forced


def score_texts(
    form: Format, samples: dict[SpeculationMode, Sequence[Sample]], texts: Sequence[str], num_forced: int
) -> FormatResult:
    """Compare the texts, one per clip in order, with the scenes."""
    read = parse_description if form is Format.JSON else parse_caption
    stated = [read(text) for text in texts]
    marks = [fact_marks(sample_scene(TEST_SEEDS[clip]), facts) for clip, facts in enumerate(stated)]
    return FormatResult(
        samples=samples,
        num_valid=sum(facts is not None for facts in stated),
        num_right=sum(all(is_right for _, is_right in clip) for clip in marks),
        num_forced=num_forced,
    )


def format_row(form: Format, results: Mapping[Format, FormatResult], num_clips: int) -> Row:
    """Results of one form. Rates leave out each answer's first tokens; `over_caption` compares with captions in off."""
    mine, captions = results[form], results[Format.CAPTION]
    gain, captions_gain = (speedup(of.samples[_PARALLEL], of.samples[_OFF]) for of in (mine, captions))
    num_tokens = sum(len(sample.ids) for sample in mine.samples[_OFF])
    acceptance_rate, num_accepted = acceptance(mine.samples[_PARALLEL])
    return {
        "form": form.value,
        "tokens": num_tokens / num_clips,
        "tokens_per_s_off": decode_rate(mine.samples[_OFF]),
        "tokens_per_s_parallel": decode_rate(mine.samples[_PARALLEL]),
        "over_caption": speedup(mine.samples[_OFF], captions.samples[_OFF]).value,
        "speedup": gain.value,
        "speedup_interval": gain.interval,
        "speedup_over_captions": gain.value / captions_gain.value if gain.value and captions_gain.value else None,
        "acceptance_rate": acceptance_rate,
        "accepted_per_verification": num_accepted,
        "forced": mine.num_forced / num_tokens,
        "valid": mine.num_valid / num_clips,
        "all_facts_right": mine.num_right / num_clips,
        "identical": mine.is_identical,
    }


def structured_report(options: StructuredOptions, pair: EngineConfig, results: Mapping[Format, FormatResult]) -> Report:
    """Figures and table of the measurements."""
    # The run may have been interrupted.
    options = replace(options, num_clips=len(results[Format.CAPTION].samples[_OFF]))
    rows = [format_row(form, results, options.num_clips) for form in Format]
    assert pair.draft is not None
    models = f"target {pair.target.model}, draft {pair.draft.model}"
    is_identical = all(row["identical"] for row in rows)
    return Report(
        bench="structured",
        baseline=f"plain captions in the same run; speed-ups over off: the target alone, {num_cores()} threads",
        facts={
            "models": models,
            "clips": f"{options.num_clips}, at most {options.max_tokens} tokens an answer, {options.sampling_text}",
        },
        figures={
            "clips": options.num_clips,
            "max_tokens": options.max_tokens,
            "sampling": options.sampling(),
            "identical": is_identical,
            "results": rows,
        },
        body=list(_body(rows)),
        failure=None if is_identical else "the modes did not give the same token ids",
    )


def _body(rows: Sequence[Row]) -> Iterator[RenderableType]:
    columns = {
        "form": column("form"),
        "tokens": column("tokens", "{:.0f}"),
        "off tok/s": column("tokens_per_s_off", "{:.0f}"),
        "ratio": column("over_caption", "{:.2f}x"),
        "parallel": column("tokens_per_s_parallel", "{:.0f}"),
        "speed-up": column("speedup", "{:.2f}x", with_interval=True),
        "ratio ": column("speedup_over_captions", "{:.2f}x"),
        "alpha": column("acceptance_rate", "{:.0%}"),
        "accepted": column("accepted_per_verification", "{:.1f}"),
        "forced": column("forced", "{:.0%}"),
        "valid": column("valid", "{:.0%}"),
        "right": column("all_facts_right", "{:.0%}"),
        "same": lambda row: "yes" if row["identical"] else "NO",
    }
    yield table("Answers with and without a grammar", columns, rows)
    yield "ratio: to plain captions; alpha: acceptance rate; accepted: draft tokens accepted per verification;"
    yield "same: both modes gave the same token ids; forced: tokens for which the grammar leaves no choice;"
    yield "valid: the answer can be read in full; right: it states every fact of the clip, and none wrongly"
