"""`bench structured` without models: how its figures are computed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.fakes import FINISHED, PROMPT_READY, FakeEngine
from tests.unit.bench.reports import text_of
from vidspec_models.bundled.description import DESCRIPTION_SCHEMA, describe
from vidspec_models.bundled.scene import TEST_SEEDS, sample_scene
from vidspec_models.request import SpeculationMode
from vidspec_service.bench import structured
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.structured import (
    MODES,
    Format,
    FormatResult,
    StructuredOptions,
    measure_structured,
    score_texts,
    structured_report,
)
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.types import TextDelta, TokenDetail, TokenSource

PAIR = EngineConfig(target=WorkerConfig(model="a"), draft=WorkerConfig(model="b"))


def samples(token_s: float, count: int = 2, num_tokens: int = 11) -> Sequence[Sample]:
    return [
        Sample(
            ids=tuple(range(num_tokens)),
            prompt_tokens=5,
            submitted=0.0,
            times=(1.0, 1.0 + token_s * (num_tokens - 1)),
            group=clip,
            prompt=clip,
        )
        for clip in range(count)
    ]


def results(off_s: float, parallel_s: float, **others: int) -> FormatResult:
    answers = dict(zip(MODES, (samples(off_s), samples(parallel_s)), strict=True))
    return FormatResult(samples=answers, **{"num_valid": 2, "num_right": 1, "num_forced": 0, **others})


def test_a_row_compares_modes_and_forms_in_one_run() -> None:
    found = {
        Format.CAPTION: results(0.010, 0.005),
        Format.ANY_TEXT: results(0.0125, 0.005),
        Format.JSON: results(0.010, 0.0025, num_forced=11),
    }
    report = structured_report(StructuredOptions(num_clips=2), PAIR, found)
    caption, any_text, as_json = report.figures["results"]
    assert caption["tokens_per_s_off"] == pytest.approx(100)
    assert (caption["speedup"], caption["speedup_over_captions"]) == (pytest.approx(2), pytest.approx(1))
    assert any_text["over_caption"] == pytest.approx(0.8)
    assert (as_json["speedup"], as_json["speedup_over_captions"]) == (pytest.approx(4), pytest.approx(2))
    assert (as_json["forced"], as_json["valid"], as_json["all_facts_right"]) == (0.5, 1.0, 0.5)
    assert report.figures["identical"]
    assert "4.00x" in text_of(report)
    assert json.loads(report.to_json())["results"][2]["form"] == "JSON"


def test_every_clip_is_timed_once_in_each_form_and_mode_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    forced = TokenDetail(text="A", source=TokenSource.GRAMMAR)
    engine = FakeEngine(PROMPT_READY, TextDelta(text="A", num_tokens=1, ids=(1,), details=(forced,)), FINISHED)
    monkeypatch.setattr(structured, "new_engine", lambda _: nullcontext(engine))
    found = measure_structured(StructuredOptions(num_clips=3), PAIR, lambda *_: None)
    for result in found.values():
        assert [[sample.group for sample in result.samples[mode]] for mode in MODES] == [[0, 1, 2]] * 2
        assert (result.num_valid, result.num_forced) == (0, 3)
    asked = Counter(request.request_id.rpartition("-")[2] for request in engine.requests)
    assert asked == {"2": 2 * 6, "1": 2 * 6, "0": 6, "untimed": 3 * 3}  # warm-ups are about clips -2 and -1


def test_one_clip_has_no_interval_and_one_token_no_rate() -> None:
    for num_tokens, speedup, rate in ((11, pytest.approx(2), pytest.approx(100)), (1, None, None)):
        answers = dict(zip(MODES, (samples(0.010, 1, num_tokens), samples(0.005, 1, num_tokens)), strict=True))
        found = dict.fromkeys(Format, FormatResult(samples=answers, num_valid=1, num_right=1, num_forced=0))
        report = structured_report(StructuredOptions(num_clips=1), PAIR, found)
        assert [(row["speedup"], row["speedup_interval"]) for row in report.figures["results"]] == [(speedup, None)] * 3
        assert [row["tokens_per_s_off"] for row in report.figures["results"]] == [rate] * 3
        assert "nan" not in text_of(report)


def test_no_form_can_repeat_what_another_has_answered_about_the_same_clip() -> None:
    scopes = {StructuredOptions().request(form, mode, 0).cache_scope for form in Format for mode in MODES}
    assert len(scopes) == len(Format)


def test_other_ids_in_a_mode_are_seen() -> None:
    one = results(0.01, 0.01)
    other = FormatResult(
        samples={**one.samples, SpeculationMode.PARALLEL: samples(0.01, num_tokens=12)},
        num_valid=2, num_right=2, num_forced=0,
    )  # fmt: skip
    for found, failure in ((one, None), (other, "the modes did not give the same token ids")):
        report = structured_report(StructuredOptions(num_clips=2), PAIR, dict.fromkeys(Format, found))
        assert (report.figures["identical"], report.failure) == (failure is None, failure)


def test_answers_are_judged_against_their_scenes() -> None:
    scenes = [sample_scene(TEST_SEEDS[clip]) for clip in range(3)]
    texts = [describe(scenes[0]), describe(scenes[0]), '{"background":']
    found = score_texts(Format.JSON, {}, texts, 7)
    assert (found.num_valid, found.num_right, found.num_forced) == (2, 1, 7)


def test_the_grammars_allow_what_is_asked_for() -> None:
    said = describe(sample_scene(3))
    jsonschema.validate(json.loads(said), DESCRIPTION_SCHEMA)
    for form, text in ((Format.JSON, said), (Format.ANY_TEXT, "Any text,\nof two lines.")):
        assert form.grammar is not None
        matcher = LLMatcher(LLTokenizer("byte"), form.grammar)
        assert matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        assert matcher.is_accepting()
    assert Format.CAPTION.grammar is None
