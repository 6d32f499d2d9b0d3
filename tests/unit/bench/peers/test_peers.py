"""`bench peers` without models: which engines are compared, and what is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.unit.bench.reports import text_of
from vidspec_service.bench.common.samples import Sample, decode_rate
from vidspec_service.bench.peers import engines, run
from vidspec_service.bench.peers.engines import ENGINES
from vidspec_service.bench.peers.pair import Embeddings, Pair, PromptEmbeddings, Step, sample_of_stream
from vidspec_service.bench.peers.report import peers_report
from vidspec_service.bench.peers.run import EngineRun, PeerPrompt, PeersOptions, measure_peers
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.types import SpeculationStats
from vidspec_service.errors import ConfigError

PAIR = EngineConfig(target=WorkerConfig(model="bundled"), draft=WorkerConfig(model="bundled"))


async def never_called(_: PeerPrompt) -> tuple[Sample, float]:
    raise AssertionError


def results(
    name: str, bits: int, token_s: float, prefill_s: float, *, speculates: bool = False, last_id: int = 7
) -> EngineRun:
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
    return EngineRun(
        name=name, bits=bits, speculates=speculates, answer=never_called, samples=samples, prefill_s=[prefill_s] * 3
    )


FOUND = [
    results("transformers", 32, 0.020, 0.300),
    results("vidspec int8, off", 8, 0.004, 0.150),
    results("vidspec int8, parallel", 8, 0.001, 0.160, speculates=True),
    results("vidspec float32, off", 32, 0.005, 0.200),
    results("ik_llama.cpp bf16", 16, 0.003, 0.250),
    results("ik_llama.cpp q8_0", 8, 0.002, 0.200, last_id=8),
    results("OpenVINO int8", 8, 0.003, 0.190),
    results("ik_llama.cpp q8_0, 8 ahead", 8, 0.002, 0.200, speculates=True),
    results("ONNX Runtime int4, 8 ahead", 4, 0.0015, 0.200, speculates=True),
]


def test_ours_are_compared_with_the_best_that_do_as_much() -> None:
    report = peers_report(FOUND)
    found = {(row["what"], row["ours"], row["over"]): row["ratio"] for row in report.figures["comparisons"]}
    assert found == {
        ("decoding", "vidspec int8, off", "ik_llama.cpp q8_0"): pytest.approx(0.5),
        ("prefill, time", "vidspec int8, off", "transformers"): pytest.approx(0.5),
        ("prefill, time", "vidspec int8, off", "OpenVINO int8"): pytest.approx(0.15 / 0.19),
        ("decoding", "vidspec int8, parallel", "ONNX Runtime int4, 8 ahead"): pytest.approx(1.5),
        # Peers with fewer bits than ours do not count in decoding alone, where they read less per token; a prefill is
        # bound by arithmetic, so there they count.
        ("decoding", "vidspec float32, off", "transformers"): pytest.approx(4.0),
        ("prefill, time", "vidspec float32, off", "transformers"): pytest.approx(2 / 3),
        ("prefill, time", "vidspec float32, off", "OpenVINO int8"): pytest.approx(0.2 / 0.19),
    }


def test_ours_are_compared_with_transformers_where_nobody_else_was_asked() -> None:
    alone = [each for each in FOUND if each.name in ("transformers", "vidspec int8, off")]
    parallel = next(each for each in FOUND if each.name == "vidspec int8, parallel")
    report = peers_report([*alone, parallel])
    assert [(row["what"], row["over"]) for row in report.figures["comparisons"]] == [
        ("decoding", "transformers"),
        ("prefill, time", "transformers"),
    ]


def test_rows_tell_speed_and_whose_text_is_transformers() -> None:
    report = peers_report([*FOUND[5:], *FOUND[:5]])
    rows = {row["name"]: row for row in report.figures["results"]}
    assert rows["vidspec int8, off"]["tokens_per_s"] == pytest.approx(250)
    assert rows["vidspec int8, parallel"]["acceptance_rate"] == pytest.approx(0.9)
    assert rows["vidspec int8, off"]["acceptance_rate"] is None
    assert rows["ik_llama.cpp bf16"]["as_transformers"] == 3
    assert rows["ik_llama.cpp q8_0"]["as_transformers"] == 0
    assert "0.79x (0.79x..0.79x)" in text_of(report)


def test_the_plot_has_a_bar_for_each() -> None:
    figure = Figure()
    peers_report(FOUND).plots["plot"].draw(figure)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [each.name for each in reversed(FOUND)]
    assert len(axes.patches) == len(FOUND)


def test_other_models_are_refused() -> None:
    other = EngineConfig(target=WorkerConfig(model="someone/else"), draft=WorkerConfig(model="bundled"))
    with pytest.raises(ConfigError, match="bundled pair"):
        measure_peers(PeersOptions(), other, lambda *_: None)


def test_missing_packages_are_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name in ("gguf", "nncf") else object())
    with pytest.raises(ConfigError, match=r"gguf and nncf missing: pip install 'vidspec\[peers\]', or .* --peers"):
        measure_peers(PeersOptions(), PAIR, lambda *_: None)


def test_packages_of_engines_that_nobody_asked_for_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == "gguf" else object())
    options = PeersOptions(peers=("onnxruntime",), draft_tokens=(64,))
    with pytest.raises(ConfigError, match="at most 63"):  # the next check
        measure_peers(options, PAIR, lambda *_: None)


@pytest.mark.parametrize(
    ("engine", "asked", "own"),
    [
        ("ik_llama.cpp", ("bf16", "q8_0", "f16"), ["bf16", "q8_0", "f16"]),
        ("openvino", ("bf16", "q8_0", "q4_0"), ["f16", "int8"]),
        ("onnxruntime", ("bf16", "f32", "q4_0"), ["fp32", "int4"]),
        ("assisted", ("bf16", "q8_0"), ["float32"]),
    ],
)
def test_an_engine_takes_its_narrowest_weights_of_as_many_bits(
    engine: str, asked: tuple[str, ...], own: list[str]
) -> None:
    assert list(ENGINES[engine].weights(asked)) == own


def test_more_draft_tokens_than_a_batch_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 63, not 64"):
        measure_peers(PeersOptions(draft_tokens=(8, 64)), PAIR, lambda *_: None)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_device_that_the_others_do_not_use_is_refused(role: str) -> None:
    pair = replace(PAIR, **{role: replace(getattr(PAIR, role), device="cuda:0")})
    with pytest.raises(ConfigError, match="on the CPU: leave out cuda:0"):
        measure_peers(PeersOptions(peers=()), pair, lambda *_: None)


@pytest.mark.anyio
async def test_ours_run_on_the_cores_that_the_others_have_even_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    child, engine = Mock(return_value=nullcontext()), Mock(return_value=nullcontext())
    monkeypatch.setattr(run, "Child", child)
    monkeypatch.setattr(run, "new_engine", engine)
    async with AsyncExitStack() as stack:
        await run._ours(stack, PAIR, "int8", lambda *_: None)
    _, spec, _ = child.call_args.args
    alone, both = (call.args[0] for call in engine.call_args_list)
    loaded = (spec, alone.target, both.target, both.draft)
    assert {(each.dtype, each.device) for each in loaded} == {("int8", "cpu")}


class Counter:
    """Predicts n + 1 after n, except at one position, from which on it is off by one."""

    def __init__(self, wrong: int = 0) -> None:
        self.length = 0
        self.rows: list[int] = []
        self._wrong = wrong

    def prefill(self, embeddings: Embeddings) -> int:
        self.rows = [0] * len(embeddings)
        self.length = len(embeddings)
        return 10

    def step(self, ids: Sequence[int], num_wanted: int) -> list[int]:
        self.rows += ids
        self.length = len(self.rows)
        return [each + 1 + (each + 1 == self._wrong) for each in ids[-num_wanted:]]

    def truncate(self, length: int) -> None:
        del self.rows[length:]
        self.length = length


def prompt() -> PromptEmbeddings:
    return PromptEmbeddings(index=0, target=np.zeros((3, 4), np.float32), draft=np.zeros((3, 2), np.float32))


@pytest.mark.parametrize(("num_draft_tokens", "wrong"), [(0, 0), (1, 0), (3, 0), (1, 11), (3, 12), (3, 13), (3, 19)])
def test_the_loop_says_what_the_target_says_alone(num_draft_tokens: int, wrong: int) -> None:
    target, draft = Counter(), Counter(wrong)
    found, prefill_s = Pair(target, draft, end_id=19).answer(prompt(), 50, num_draft_tokens)
    assert found.ids == tuple(range(10, 20))
    assert prefill_s >= 0
    assert target.rows == [0, 0, 0, *range(10, 19)]  # rejected rows were removed
    assert draft.length == len(draft.rows)  # only existing rows can be removed
    assert found.speculation.num_draft_tokens - found.speculation.num_accepted_tokens == (wrong > 0)


def test_the_loop_ends_with_the_tokens_that_were_asked_for() -> None:
    assert Pair(Counter(), Counter(), end_id=19).answer(prompt(), 4, 8)[0].ids == (10, 11, 12, 13)


@pytest.mark.parametrize(("max_tokens", "wrong", "judged"), [(4, 0, 3), (4, 12, 3), (50, 0, 9), (50, 19, 9)])
def test_draft_tokens_after_the_answers_end_are_not_judged(max_tokens: int, wrong: int, judged: int) -> None:
    """As everywhere: an answer of four tokens has at most three that a draft can have proposed."""
    found, _ = Pair(Counter(), Counter(wrong), end_id=19).answer(prompt(), max_tokens, 12)
    assert found.speculation.num_draft_tokens == judged
    assert found.speculation.num_accepted_tokens == judged - (wrong > 0)


def test_answers_that_end_with_their_prompt_are_not_compared() -> None:
    short = [replace(each, samples=[replace(one, num_first=5, times=(1.0,)) for one in each.samples]) for each in FOUND]
    report = peers_report(short)
    assert {(row["tokens_per_s"], row["tokens_per_s_interval"]) for row in report.figures["results"]} == {(None, None)}
    assert {row["ratio"] for row in report.figures["comparisons"] if row["what"] == "decoding"} == {None}
    assert "nan" not in text_of(report)
    report.plots["plot"].draw(Figure())


def test_one_prompt_has_no_intervals() -> None:
    one = [replace(each, samples=each.samples[:1], prefill_s=each.prefill_s[:1]) for each in FOUND]
    report = peers_report(one)
    assert {row["tokens_per_s_interval"] for row in report.figures["results"]} == {None}
    assert {row["ratio_interval"] for row in report.figures["comparisons"]} == {None}
    report.plots["plot"].draw(Figure())


def test_what_a_streamer_saw_is_an_answer() -> None:
    steps = [Step(1.0, 1), Step(2.0, 9), Step(3.0, 9), Step(4.0, 4), Step(5.0, 2)]
    found = sample_of_stream(3, range(25), steps, 8, began=0.5, untimed=2)
    assert (found.times, found.num_first) == ((2.0, 3.0, 4.0, 5.0), 10)
    assert decode_rate([found]) == pytest.approx(15 / 3.0), "of the tokens behind those of the prompt"
    speculation = found.speculation
    assert (speculation.num_accepted_tokens, speculation.num_draft_tokens) == (8 + 3 + 1, 8 + 4 + 1)
