"""`bench peers` without models: who is compared with whom, and what is refused before anything is loaded."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vidspec_service.bench.common.facts import Provenance
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.peers import run
from vidspec_service.bench.peers.report import peers_report
from vidspec_service.bench.peers.run import Contender, PeersOptions, Prompt, Results, measure_peers
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.types import SpeculationStats
from vidspec_service.errors import ConfigError

PAIR = EngineConfig(target=WorkerConfig(model="bundled"), draft=WorkerConfig(model="bundled"))
PROVENANCE = Provenance(command="vidspec bench peers", created="now", versions={}, load_average=0.0)


async def unasked(_: Prompt) -> tuple[Sample, float]:
    raise AssertionError


def results(
    name: str, bits: int, token_s: float, prefill_s: float, *, speculates: bool = False, last_id: int = 7
) -> Results:
    stats = SpeculationStats(num_draft_tokens=10, num_accepted_tokens=9) if speculates else SpeculationStats()
    samples = [
        Sample(
            ids=(1, 2, 3, 4, last_id),
            prompt_tokens=525,
            submitted=0.0,
            times=(1.0, 1.0 + 4 * token_s),
            speculation=stats,
            group=clip,
        )
        for clip in range(3)
    ]
    contender = Contender(name=name, bits=bits, speculates=speculates, ask=unasked)
    return Results(contender=contender, samples=samples, prefill_s=[prefill_s] * 3)


FOUND = [
    results("transformers", 32, 0.020, 0.300),
    results("vidspec int8, off", 8, 0.004, 0.150),
    results("vidspec int8, parallel", 8, 0.001, 0.160, speculates=True),
    results("vidspec float32, off", 32, 0.005, 0.200),
    results("ik_llama.cpp bf16", 16, 0.003, 0.250),
    results("ik_llama.cpp q8_0", 8, 0.002, 0.200, last_id=8),
    results("ik_llama.cpp q8_0, 8 ahead", 8, 0.002, 0.200, speculates=True),
]


def test_ours_are_compared_with_the_best_that_do_as_much() -> None:
    report = peers_report(PeersOptions(num_prompts=3), FOUND, PROVENANCE)
    found = {(row["what"], row["ours"], row["over"]): row["ratio"] for row in report.figures["comparisons"]}
    assert found == {
        ("decoding", "vidspec int8, off", "ik_llama.cpp q8_0"): pytest.approx(0.5),
        ("prefill, time", "vidspec int8, off", "transformers"): pytest.approx(0.5),
        ("prefill, time", "vidspec int8, off", "ik_llama.cpp q8_0"): pytest.approx(0.75),
        ("decoding", "vidspec int8, parallel", "ik_llama.cpp q8_0, 8 ahead"): pytest.approx(2.0),
        # Of fewer bits than ours nobody counts who reads less for a token; a prefill is bound by arithmetic.
        ("decoding", "vidspec float32, off", "transformers"): pytest.approx(4.0),
        ("prefill, time", "vidspec float32, off", "transformers"): pytest.approx(2 / 3),
        ("prefill, time", "vidspec float32, off", "ik_llama.cpp q8_0"): pytest.approx(1.0),
    }


def test_rows_tell_speed_and_whose_text_is_transformers() -> None:
    report = peers_report(PeersOptions(num_prompts=3), FOUND, PROVENANCE)
    rows = {row["name"]: row for row in report.figures["results"]}
    assert rows["vidspec int8, off"]["tokens_per_s"] == pytest.approx(250)
    assert rows["vidspec int8, parallel"]["acceptance_rate"] == pytest.approx(0.9)
    assert rows["ik_llama.cpp bf16"]["as_transformers"] == 3
    assert rows["ik_llama.cpp q8_0"]["as_transformers"] == 0
    console = Console(file=io.StringIO(), width=148)
    report.show(console)
    assert "0.75x (0.75x..0.75x)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_plot_has_a_bar_for_each() -> None:
    figure_of = pytest.importorskip("matplotlib.figure")
    figure = figure_of.Figure()
    peers_report(PeersOptions(num_prompts=3), FOUND, PROVENANCE).pictures["plot"].draw(figure)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        each.contender.name for each in reversed(FOUND)
    ]


def test_other_models_are_refused() -> None:
    other = EngineConfig(target=WorkerConfig(model="someone/else"), draft=WorkerConfig(model="bundled"))
    with pytest.raises(ConfigError, match="bundled pair"):
        measure_peers(PeersOptions(), other, lambda *_: None)


def test_missing_packages_are_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ConfigError, match=r"gguf missing: pip install 'vidspec\[peers\]'"):
        measure_peers(PeersOptions(), PAIR, lambda *_: None)


def test_more_draft_tokens_than_a_batch_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="63 at most, not 64"):
        measure_peers(PeersOptions(draft_tokens=(8, 64)), PAIR, lambda *_: None)
