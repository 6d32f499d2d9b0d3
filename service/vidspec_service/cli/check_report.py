"""The report of `vidspec check`, and its rows about devices: how steps are computed, memory, a random pair."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import psutil

from vidspec_models.loading.cuda_driver import find_devices
from vidspec_models.request import SpeculationMode
from vidspec_models.step_path import StepPath
from vidspec_service.bench.speed.device import DeviceFacts, fitting_pair
from vidspec_service.cli.terminal import printable, printable_json, say
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.interface import EngineInfo
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings, engine_config
from vidspec_service.settings.derived import BUNDLED

_GIB = 2**30


class CheckReport:
    """Prints facts as rows of a plain table, or as one JSON object at the end; collects what is wrong.

    A fact has a short name, a text and, where the JSON is to have something else, a value for the JSON.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._facts: dict[str, dict[str, Any]] = {}
        self.section = "service"  # the name in the JSON under which the next facts are
        self._good: list[str] = []
        self._problems: list[str] = []

    def add(self, name: str, text: str, fact: object = None) -> None:
        """Add one fact; `fact`, its value in the JSON, consists of dataclasses, numbers, lists and dicts of these."""
        facts = self._facts.setdefault(self.section, {})
        facts[name] = text if fact is None else msgspec.to_builtins(fact, str_keys=True)
        if not self._as_json:
            say(f"{name:<12}{printable(text)}")

    def passed(self, text: str) -> None:
        """Something that works, for the verdict."""
        self._good.append(text)

    def problem(self, text: str) -> None:
        """Something that does not work, and what to do about it: the check fails."""
        if text not in self._problems:
            self._problems.append(text)

    def finish(self) -> int:
        """Print the verdict; returns the exit code."""
        if self._as_json:
            say(printable_json({**self._facts, "problems": self._problems, "verdict": self._good}))
        else:
            self.add("verdict", "; ".join([*self._problems, *self._good]))
        return 1 if self._problems else 0


def place(args: argparse.Namespace) -> None:
    """Put each model without its own flag on `--device`: of several GPUs each gets one. Raises ConfigError."""
    if args.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        raise ConfigError(f"--device: expected cpu, cuda or cuda:N, not {args.device!r}")
    found = find_devices() if args.device == "cuda" else None
    names = {"target": f"cuda:{found.count - 1}", "draft": "cuda:0"} if found and found.count > 1 else {}
    for role in ("target", "draft"):
        if getattr(args, f"{role}_device") is None:
            setattr(args, f"{role}_device", names.get(role, args.device))


def random_pair(settings: Settings) -> tuple[EngineConfig, str]:
    """An engine for random models on the devices of the settings, and the shape that fits them."""
    own = {"model": BUNDLED, "draft_model": None, "speculation": SpeculationMode.AUTO, "log_level": "warning"}
    pair = engine_config(settings.model_copy(update={**own, "max_context": None, "kv_cache_tokens": None}))
    return pair, _shape(settings)


def _shape(settings: Settings) -> str:
    target, draft = settings.target_device.partition(",")[0], settings.draft_device
    found = find_devices() if "cuda" in target else None
    if found is None or not found.count:
        return fitting_pair(0)
    room = [int(settings.gpu_memory_utilization * num_bytes) for num_bytes in found.total_bytes]
    on_target, on_draft = (int(name.partition(":")[2] or 0) for name in (target, draft))
    return fitting_pair(room[on_target], None if on_target == on_draft or "cuda" not in draft else room[on_draft])


def add_models(report: CheckReport, info: EngineInfo) -> None:
    """Which models run, and where; an n-gram draft has no device."""
    report.add("target", f"{info.model} on {info.devices['target']}, context {info.context_length} tokens")
    where = f" on {info.devices['draft']}" if "draft" in info.devices else ""
    report.add("draft", f"{info.draft_model}{where}" if info.draft_model else "none")


def add_engine(report: CheckReport, info: EngineInfo, paths: Mapping[str, StepPath]) -> None:
    """How steps are computed, whether they are batch-invariant, and what memory there is."""
    said = [f"{role} {path.how}" + (f" ({path.fallback})" if path.fallback else "") for role, path in paths.items()]
    report.add("steps", ", ".join(said) or "unknown", paths)
    for role, path in paths.items():
        if path.fallback:
            report.problem(
                f"the {role} is several times slower than it should be: {path.fallback}; remedy: {path.remedy}"
            )
    report.add("invariant", "yes" if info.is_batch_invariant else "NO", info.is_batch_invariant)
    if not info.is_batch_invariant:
        report.problem("results depend on the batch: speculation may change the text (remedy: --speculation off)")
    host_bytes = psutil.virtual_memory().total
    fact = {"kv_cache_tokens": info.kv_cache_tokens, "workers": info.memory, "host_bytes": host_bytes}
    report.add("memory", "; ".join(_held(role, info) for role in info.memory), fact)


def _held(role: str, info: EngineInfo) -> str:
    tokens = info.kv_cache_tokens[role]
    return ", ".join(
        f"{role} on {each.device}: {_gib(each.weights)} GiB of weights, {_gib(each.activations)} of activations, "
        f"{_gib(tokens * each.token_bytes)} of KV cache for {tokens} tokens, of {_gib(each.total)} GiB"
        for each in info.memory[role].devices
    )


def add_device(report: CheckReport, facts: DeviceFacts) -> None:
    """What the random pair showed."""
    report.section = "device"
    devices = ", ".join(f"{role} on {device}" for role, device in facts.info.devices.items())
    report.add("pair", f"random weights, shape {facts.shape}; {devices}", {"shape": facts.shape, "devices": devices})
    add_engine(report, facts.info, facts.step_paths)
    num_wrong = len(facts.forks)
    if num_wrong:
        report.problem(
            f"{num_wrong} of {facts.num_answers} answers of random models had other token ids with speculation"
        )
    else:
        report.passed("speculation changes no token id of random models")
    report.add(
        "identity",
        f"{facts.num_answers - num_wrong} of {facts.num_answers} answers in off, serial and parallel have the same ids",
        {"num_answers": facts.num_answers, "forks": facts.forks},
    )
    report.add(
        "bandwidth",
        "; ".join(
            "{role} step {step:.2f} ms for {size:.2f} GB, {share:.0%} of a copy's {copy:.0f} GB/s".format(
                role=role,
                step=1000 * line["step_s"],
                size=(line["weight_bytes"] + line["cache_bytes"]) / 1e9,
                share=line["of_roofline"],
                copy=line["bandwidth"] / 1e9,
            )
            for role, line in facts.rooflines.items()
        ),
        {"rooflines": facts.rooflines, "forwards": facts.forwards},
    )
    gains = ", ".join(f"{gain:.2f}x at {acceptance:g}" for acceptance, gain in facts.speedups.items())
    mode = "auto, in turns on one GPU," if facts.take_turns else "parallel"
    report.add("speed-up", f"expected for {mode} over off: {gains} of draft tokens accepted", facts.speedups)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f}"
