"""`bench speed --random-weights`: its flags, its order of modes, and its figures from bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from vidspec_models.loading.spec import ModelSpec
from vidspec_models.synthetic.recipe import SHAPES
from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.speed import costs
from vidspec_service.bench.speed.costs import BusyDraft, ForwardTimes, time_forwards
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.bench.speed.synthetic import phases, roofline, synthetic_facts, synthetic_notes
from vidspec_service.cli.parsing import parse
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.errors import ConfigError

PAIR = EngineConfig(target=WorkerConfig(model="target", threads=1), draft=WorkerConfig(model="draft", threads=1))


def test_flags_become_options() -> None:
    flags = ["--random-weights", "--shape", "tiny", "--alpha", "0.9"]
    found = options_from_args(SpeedOptions, parse(["bench", "speed", *flags])[1])
    assert found == SpeedOptions(is_synthetic=True, shape="tiny", acceptance=0.9)
    assert found.task_name == "synthetic"


def test_the_target_speaks_alone_before_an_oracle_repeats_it() -> None:
    assert phases(tuple(Mode)) == [(Mode.HF,), (Mode.OFF,), (Mode.SERIAL, Mode.PARALLEL, Mode.AUTO)]
    assert phases((Mode.PARALLEL, Mode.OFF)) == [(Mode.OFF,), (Mode.PARALLEL,)]


def test_prompts_are_asked_by_number() -> None:
    asked = SpeedOptions(is_synthetic=True).request(Mode.OFF, 0, 2)
    assert asked.turns[-1].text == "prompt 2"


def test_a_step_as_slow_as_its_bytes_is_on_the_roofline() -> None:
    shape, token_bytes = SHAPES["llava-onevision-7b+0.5b"].target, 57_344
    num_bytes = 2 * shape.step_parameters() + 6400 * token_bytes
    timed = {1: num_bytes / 3e12}
    on_it = ForwardTimes(
        threads=1, seconds=timed, token_bytes=token_bytes, bandwidth=3e12, device="cuda:0", dtype="bfloat16"
    )
    found = roofline(shape, on_it, 6400)
    assert found["weight_bytes"] + found["cache_bytes"] == num_bytes
    assert found["of_roofline"] == pytest.approx(1.0)
    assert found["over_weights"] == pytest.approx(num_bytes / found["weight_bytes"])
    assert 14e9 < found["weight_bytes"] < 15.5e9  # 7.6 billion weights; one embedding row
    in_int8 = roofline(shape, replace(on_it, dtype="int8"), 6400)
    assert in_int8["weight_bytes"] == pytest.approx(found["weight_bytes"] / 2, rel=0.01)
    assert in_int8["cache_bytes"] == found["cache_bytes"]  # as it was measured


class Children:
    """Replaces the processes in which models are timed; records what each runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_at_work: bool = True) -> None:
        self.functions = list[object]()
        self._is_at_work = is_at_work
        monkeypatch.setattr(costs, "call_in_child", self.call_in_child)
        monkeypatch.setattr(costs, "Child", self.beside)
        monkeypatch.setattr(costs, "threads_of", lambda config: {"target": 1 if config.draft else 3, "draft": 1})

    def call_in_child(
        self, function: object, spec: ModelSpec, threads: int, *_: object, with_copies: bool = False
    ) -> ForwardTimes:
        self.functions.append((function, with_copies))
        bandwidth = {"target": 2e9, "draft": 1e9}[spec.role] * threads if with_copies else None
        return ForwardTimes(threads=threads, seconds={1: 0.01}, device="cpu", dtype="float32", bandwidth=bandwidth)

    @contextmanager
    def beside(self, made: object, spec: ModelSpec, *given: int) -> Iterator[Children]:
        self.functions.append(made)
        yield self
        self.functions.append("ended")

    def call(self, method: object) -> bool:
        assert method is BusyDraft.is_at_work
        return self._is_at_work


def test_forwards_are_not_taken_for_timed_beside_a_draft_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    Children(monkeypatch, is_at_work=False)
    with pytest.raises(ConfigError, match="the draft process stopped while the target was timed"):
        costs.probe_costs(PAIR, 600, (1, 2))


@pytest.mark.parametrize("with_copies", [True, False])
def test_copies_are_timed_in_the_processes_of_the_forwards(monkeypatch: pytest.MonkeyPatch, with_copies: bool) -> None:
    children = Children(monkeypatch)
    probed = costs.probe_costs(PAIR, 600, (1, 2), with_copies=with_copies)
    asked, beside = (time_forwards, with_copies), (time_forwards, False)
    assert children.functions == [asked, BusyDraft, beside, "ended", asked]  # target alone, beside the draft; the draft
    assert (probed.target.threads, probed.alone.threads) == (1, 3)
    if with_copies:
        rooflines = synthetic_facts(SpeedOptions(shape="tiny"), probed)["rooflines"]
        assert {role: line["bandwidth"] for role, line in rooflines.items()} == {"target": 6e9, "draft": 1e9}


def test_a_shared_device_is_said() -> None:
    pair = SHAPES["tiny"]
    assert any("share cuda:0" in note for note in synthetic_notes(pair, {"target": "cuda:0", "draft": "cuda:0"}))
    assert not any("share" in note for note in synthetic_notes(pair, {"target": "cuda:1", "draft": "cuda:0"}))
