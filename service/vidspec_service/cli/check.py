"""Load the models as `vidspec serve` would, send one rendered clip through the whole service, print facts and verdict.

With --device, a pair of random models in the shape of a 7B and a 0.5B (with fewer layers if memory is short, tiny on a
CPU) then tests the device: whether all modes give the same ids, memory bandwidth, expected gain of speculation.

Exit code 0: the service works; 1: it starts but does not answer, speculation changes the text, or it is several times
slower than it should be; 2: it does not start.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from vidspec_models.bundled.captions import caption, caption_marks
from vidspec_models.bundled.scene import sample_scene
from vidspec_models.loading.cuda_driver import find_devices
from vidspec_models.request import SpeculationMode
from vidspec_models.step_path import StepPath
from vidspec_service import __version__
from vidspec_service.api.app import create_app
from vidspec_service.api.services import Remotes, build_services
from vidspec_service.arguments import non_negative_int
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, write_scene
from vidspec_service.bench.speed.device import DeviceFacts, fitting_pair, measure_device
from vidspec_service.cli.serve import RunningService, running_service
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import note, printable, printable_json, progress, say, waiting
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.interface import EngineInfo
from vidspec_service.engine.frontend.supervisor import WorkerLauncher
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings, engine_config
from vidspec_service.settings.derived import BUNDLED
from vidspec_service.telemetry import configure_logging

_LIBRARIES = ("torch", "transformers", "av", "fastapi")
_QUESTION = {"prompt": CAPTION_PROMPT, "max_tokens": "128", "seed": "0"}  # without a seed each mode would have its own
_GIB = 2**30
VideoChatAnswer = dict[str, Any]  # the JSON of `/v1/video-chat`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which clip, which device, and the settings."""
    parser.add_argument(
        "--seed", type=non_negative_int, default=8, metavar="N", help="which clip to ask about (default 8)"
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="also measure this device, with a pair of random models: cpu, cuda or cuda:N"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_settings_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Check; see the exit codes above."""
    place(args)
    settings = settings_of(Settings, args).model_copy(update={"log_level": "warning"})  # of the workers, too
    configure_logging(settings.log_level, settings.log_format)
    report = CheckReport(as_json=args.json)
    with closing(WorkerLauncher(settings.log_format)) as launcher:  # one for both engines: imports take long
        is_answered = asyncio.run(_check(settings, args.seed, report, launcher))
        if is_answered and args.device is not None:
            pair, shape = random_pair(settings)
            with progress() as on_progress:
                add_device(report, asyncio.run(measure_device(pair, shape, on_progress, launcher)))
    return report.finish()


async def _check(settings: Settings, seed: int, report: CheckReport, launcher: WorkerLauncher) -> bool:
    """Ask the configured models about a clip; False if they do not answer."""
    report.add("vidspec", f"{__version__} on Python {platform.python_version()}, {platform.platform()}")
    report.add("with", ", ".join(f"{name} {version(name)}" for name in _LIBRARIES))
    async with running_service(settings, launcher) as service:
        info = service.engine.info
        add_models(report, info)
        report.add("loaded", f"in {service.load_s:.1f} s", {"seconds": service.load_s})
        add_engine(report, info, service.engine.status().step_paths)
        modes = [settings.speculation, SpeculationMode.OFF] if info.draft_model else [SpeculationMode.OFF]
        with waiting("asking about a clip"):
            responses = await ask(settings, service, seed, modes)
    for response in responses:
        if response.status_code != httpx.codes.OK:
            note(f"vidspec check: HTTP {response.status_code}: {response.text}")
            report.problem(f"the service does not answer: HTTP {response.status_code}")
            return False
    first, answer, *others = (response.json() for response in responses)
    timings, speculation, usage = first["timings"], answer["speculation"], answer["usage"]
    report.add("asked", f"{CAPTION_PROMPT} ({answer['video']['num_frames']} frames, {usage['prompt_tokens']} tokens)")
    report.add("answer", _text(answer))
    report.add(
        "timing",
        f"video decode {timings['decode_s']:.3f} s, prefill {timings['prefill_s']:.3f} s, "
        f"first token {timings['time_to_first_token_s']:.3f} s, "
        f"then {1000 * timings['time_per_output_token_s']:.1f} ms per token",
        timings,
    )
    outcome = f"{speculation['mode']}, {speculation['acceptance_rate']:.0%} accepted"
    if speculation["mode"] == "off":
        outcome = "off" if modes[0] is SpeculationMode.OFF else "off: auto expected no gain from it now"
    report.add("speculation", outcome, speculation)
    if settings.model == BUNDLED:
        report.add("truth", caption(sample_scene(seed)))
    judge(report, settings, seed, answer, others)
    return True


def judge(
    report: CheckReport, settings: Settings, seed: int, answer: VideoChatAnswer, others: Sequence[VideoChatAnswer]
) -> None:
    """Add to the verdict. One clip says little about speed: `bench speed` asks about many."""
    report.passed("it works")
    for other in others:
        alone_s, token_s = (each["timings"]["time_per_output_token_s"] for each in (other, answer))
        if token_s > 0 and answer["speculation"]["mode"] != "off":  # an answer of one token has no such time
            report.passed(f"{alone_s / token_s:.2f}x as fast as the target alone")
        if _text(other) == _text(answer):
            report.passed("the same text")
        else:
            report.problem(f"ANOTHER TEXT than the target alone, which answers: {_text(other)}")
    if settings.model == BUNDLED:
        marks = caption_marks(sample_scene(seed), _text(answer))
        report.passed(f"{sum(is_right is True for _, is_right in marks)} of {len(marks)} facts right")


async def ask(
    settings: Settings, service: RunningService, seed: int, modes: Sequence[SpeculationMode]
) -> list[httpx.Response]:
    """One answer to warm up, as the first caller gets it; then one in each mode, each as if no other had been asked."""
    with tempfile.TemporaryDirectory(prefix="vidspec-") as folder:
        clip = Path(folder) / "clip.mp4"
        write_scene(seed, clip)
        settings = settings.model_copy(update={"api_keys": None, "api_key_file": None})  # only this process can ask
        engine, decode = service.engine, service.decode_pool.decode
        services = build_services(settings, engine, decode, service.metrics, Path(folder), Remotes())
        transport = httpx.ASGITransport(create_app(services))
        async with httpx.AsyncClient(transport=transport, base_url="http://check", timeout=None) as client:
            content = await asyncio.to_thread(clip.read_bytes)
            found = []
            for number, mode in enumerate([modes[0], *modes]):
                form = {**_QUESTION, "speculation": mode.value, "cache_salt": str(number)}
                found.append(await client.post("/v1/video-chat", data=form, files={"video": content}))
            return found


def _text(answer: VideoChatAnswer) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


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
