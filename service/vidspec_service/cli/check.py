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
import tempfile
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from vidspec_models.bundled.captions import caption, caption_marks
from vidspec_models.bundled.scene import sample_scene
from vidspec_models.request import SpeculationMode
from vidspec_service import __version__
from vidspec_service.api.app import create_app
from vidspec_service.api.services import Remotes, build_services
from vidspec_service.arguments import non_negative_int
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, write_scene
from vidspec_service.bench.speed.device import measure_device
from vidspec_service.cli.check_report import CheckReport, add_device, add_engine, add_models, place, random_pair
from vidspec_service.cli.serve import RunningService, running_service
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import note, progress, waiting
from vidspec_service.engine.frontend.supervisor import WorkerLauncher
from vidspec_service.settings import Settings
from vidspec_service.telemetry import configure_logging

_LIBRARIES = ("torch", "transformers", "av", "fastapi")
_QUESTION = {"prompt": CAPTION_PROMPT, "max_tokens": "128", "seed": "0"}  # without a seed each mode would have its own
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
    with closing(WorkerLauncher()) as launcher:  # imports the workers' libraries once for both engines
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
    if settings.model == "bundled":
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
    if settings.model == "bundled":
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
