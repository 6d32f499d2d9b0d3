"""`vidspec check --device`: where the models are loaded, what is reported, and which findings make it fail."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from tests.fakes import INFO, FakeDecodePool, FakeEngine
from tests.unit.engine.test_kv_budget import worker
from vidspec_models.loading.cuda_driver import Devices
from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_models.step_path import CAPTURED, COMPILED, torch_fallback
from vidspec_service.bench.speed.costs import ForwardTimes
from vidspec_service.bench.speed.device import DeviceFacts
from vidspec_service.cli import check
from vidspec_service.cli.check import (
    CheckReport,
    VideoChatAnswer,
    add_device,
    add_engine,
    add_models,
    ask,
    judge,
    place,
    random_pair,
)
from vidspec_service.cli.serve import RunningService
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics

GIB = 2**30
LINE = {"weight_bytes": 15 * 10**9, "cache_bytes": 10**9, "bandwidth": 2e12, "step_s": 0.01, "of_roofline": 0.8}


def machine(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    monkeypatch.setattr(check, "find_devices", lambda: Devices(tuple(size * GIB for size in sizes)))


def placed(device: str | None, **flags: str) -> tuple[str | None, str | None]:
    args = argparse.Namespace(device=device, **{"target_device": None, "draft_device": None, **flags})
    place(args)
    return args.target_device, args.draft_device


def test_one_gpu_is_shared_and_two_are_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 80)
    assert placed("cuda") == ("cuda", "cuda")
    machine(monkeypatch, 80, 24)
    assert placed("cuda") == ("cuda:1", "cuda:0")
    assert placed("cuda:1") == ("cuda:1", "cuda:1")
    assert placed("cpu") == ("cpu", "cpu")
    assert placed("cuda", draft_device="cpu") == ("cuda:1", "cpu")
    assert placed(None) == (None, None)


@pytest.mark.parametrize("device", ["foo", "", "cuda:x", "auto"])
def test_a_device_that_cannot_be_one_is_refused_under_the_name_of_its_flag(device: str) -> None:
    with pytest.raises(ConfigError, match=r"^--device: "):
        placed(device)


def test_the_random_pair_fits_the_devices_it_is_put_on(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, 80)
    placements = (("cuda:1", "cuda:0"), ("cuda:0", "cuda:0"), ("cpu", "cpu"))
    shapes = [random_pair(Settings(target_device=target, draft_device=draft))[1] for target, draft in placements]
    assert shapes == ["llava-onevision-7b+0.5b", "llava-onevision-7b-of-4-layers+0.5b", "small"]


def test_it_has_a_draft_whatever_the_settings_say_of_speculation() -> None:
    pair, _ = random_pair(Settings(model="org/model", speculation="off", target_device="cpu", max_context=99))  # type: ignore[arg-type]
    assert pair.draft is not None
    assert (pair.target.device, pair.max_context) == ("cpu", None)


def asked() -> list[GenerationRequest]:
    """The requests of a check in modes `parallel` and `off`, whose checkpoint samples."""

    async def scenario() -> list[GenerationRequest]:
        engine = FakeEngine()
        engine.known = replace(INFO, default_sampling={"temperature": 0.7})
        metrics = Metrics(CollectorRegistry())
        service = RunningService(metrics=metrics, engine=engine, decode_pool=cast(Any, FakeDecodePool()), load_s=0.0)
        await ask(Settings(), service, 7, [SpeculationMode.PARALLEL, SpeculationMode.OFF])
        return engine.requests

    return asyncio.run(scenario())


def test_every_mode_draws_with_the_same_numbers_though_the_checkpoint_samples() -> None:
    *_, answer, other = asked()
    assert answer.speculation is not other.speculation
    assert answer.sampling == other.sampling
    assert answer.sampling.temperature == 0.7


def test_no_answer_is_a_repetition_of_the_one_before() -> None:
    """An n-gram draft proposes what was answered before: all of it would be accepted, which says nothing."""
    assert len({request.cache_scope for request in asked()}) == 3


def facts(**changes: Any) -> DeviceFacts:
    forwards = ForwardTimes(device="cpu", dtype="float32", threads=1, seconds={1: 0.01})
    return replace(
        DeviceFacts(
            shape="small",
            info=replace(INFO, memory={"target": worker()}, kv_cache_tokens={"target": 16384}),
            step_paths={"target": CAPTURED, "draft": COMPILED},
            num_answers=9,
            forks=(),
            forwards={"target": forwards},
            rooflines={"target": LINE},
            take_turns=False,
            speedups={0.7: 1.5, 0.9: 2.25},
        ),
        **changes,
    )


def told(capsys: pytest.CaptureFixture[str], given: DeviceFacts) -> tuple[dict[str, str], int]:
    report = CheckReport(as_json=False)
    add_device(report, given)
    code = report.finish()
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()), code


def test_every_fact_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows, code = told(capsys, facts())
    assert code == 0
    assert rows["steps"] == "target captured graphs, draft compiled kernels"
    assert rows["invariant"] == "yes"
    assert rows["memory"] == (
        "target on cuda:0: 16.0 GiB of weights, 2.0 of activations, 1.0 of KV cache for 16384 tokens, of 80.0 GiB"
    )
    assert rows["identity"].startswith("9 of 9 answers")
    assert rows["bandwidth"] == "target step 10.00 ms for 16.00 GB, 80% of a copy's 2000 GB/s"
    assert rows["speed-up"] == "expected for parallel over off: 1.50x at 0.7, 2.25x at 0.9 of draft tokens accepted"
    rows, _ = told(capsys, facts(take_turns=True))
    assert rows["speed-up"].startswith("expected for auto, in turns on one GPU, over off: 1.50x")


@pytest.mark.parametrize(
    ("draft", "devices", "said"),
    [("small", {"draft": "cuda:1"}, "small on cuda:1"), ("ngram", {}, "ngram"), (None, {}, "none")],
)
def test_a_draft_is_told_with_its_device_if_it_has_one(
    capsys: pytest.CaptureFixture[str], draft: str | None, devices: dict[str, str], said: str
) -> None:
    add_models(CheckReport(as_json=False), replace(INFO, draft_model=draft, devices={"target": "cpu", **devices}))
    assert capsys.readouterr().out.splitlines()[1].split(maxsplit=1) == ["draft", said]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"forks": ({"prompt": 1},)}, "1 of 9 answers of random models had other token ids"),
        ({"info": replace(INFO, is_batch_invariant=False)}, "remedy: --speculation off"),
        (
            {"step_paths": {"target": torch_fallback("steps cannot be captured", "install a C compiler")}},
            "the target is several times slower than it should be: steps cannot be captured; remedy: install a C",
        ),
    ],
)
def test_what_breaks_the_promise_or_costs_a_factor_fails_with_its_remedy(
    capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    rows, code = told(capsys, facts(**changes))
    assert code == 1
    assert said in rows["verdict"]


def test_as_json_it_is_one_object_with_a_part_for_the_service_and_one_for_the_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = CheckReport(as_json=True)
    slow = torch_fallback("the kernels do not compile", "install numba")
    add_models(report, INFO)
    add_engine(report, INFO, {"target": slow})
    add_device(report, facts(step_paths={"target": slow}))
    assert report.finish() == 1
    whole = json.loads(capsys.readouterr().out)
    assert whole["service"]["draft"] == "fake-draft on cpu"
    assert whole["service"]["steps"]["target"]["remedy"] == "install numba"
    assert whole["device"]["memory"]["workers"]["target"]["devices"][0]["total"] == 80 * GIB
    assert whole["device"]["speed-up"] == {"0.7": 1.5, "0.9": 2.25}
    assert len(whole["problems"]) == 1  # reported once, though both parts contain it


def answer(token_s: float, speculation: str, text: str = "Two.") -> VideoChatAnswer:
    return {
        "choices": [{"message": {"content": text}}],
        "timings": {"time_per_output_token_s": token_s},
        "speculation": {"mode": speculation},
    }


def test_another_text_than_the_target_alone_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    report = CheckReport(as_json=False)
    judge(report, Settings(model="/models/own"), 1, answer(0.01, "parallel"), [answer(0.02, "off", "Three.")])
    assert report.finish() == 1
    assert "ANOTHER TEXT than the target alone, which answers: Three." in capsys.readouterr().out


@pytest.mark.parametrize(("mode", "said"), [("parallel", "2.00x as fast as the target alone; "), ("off", "")])
def test_an_answer_that_was_not_sped_up_is_not_compared_in_speed(
    mode: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With auto, the target may choose to answer alone: two such answers differ by what else the machine does."""

    report = CheckReport(as_json=False)
    judge(report, Settings(model="/models/own"), 1, answer(0.01, mode), [answer(0.02, "off")])
    assert report.finish() == 0
    assert capsys.readouterr().out == f"verdict     it works; {said}the same text\n"


def test_an_answer_cannot_send_escape_sequences_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report = CheckReport(as_json=False)
    report.add("answer", "Two.\x1b]0;title\x07")
    report.problem("ANOTHER TEXT: \x1b[2JTwo.")
    report.finish()
    assert "\x1b" not in capsys.readouterr().out
