"""Load the models as `vidspec serve` would, send one rendered clip through the whole service, print facts and verdict.

Exit code 0: it works; 1: it starts and does not answer, or speculation changes the text; 2: it does not start.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from vidspec_models.bundled.captions import caption, caption_marks
from vidspec_models.bundled.scene import sample_scene
from vidspec_models.request import SpeculationMode
from vidspec_service import __version__
from vidspec_service.api.app import create_app
from vidspec_service.api.services import build_services
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, write_scene
from vidspec_service.cli.serve import RunningService, running_service
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import note, say, waiting
from vidspec_service.settings import Settings
from vidspec_service.telemetry import configure_logging

_LIBRARIES = ("torch", "transformers", "av", "fastapi")
_MAX_TOKENS = 128
Answer = dict[str, Any]  # the JSON of `/v1/video-chat`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which clip, and the settings."""
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="which clip to ask about (default 7)")
    add_settings_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Check; see the exit codes above."""
    settings = settings_of(args)
    configure_logging("warning", settings.log_format)
    return asyncio.run(_check(settings, args.seed))


async def _check(settings: Settings, seed: int) -> int:
    _row("vidspec", f"{__version__} on Python {platform.python_version()}, {platform.platform()}")
    _row("with", ", ".join(f"{name} {version(name)}" for name in _LIBRARIES))
    async with running_service(settings) as service:
        info = service.engine.info
        _row("target", f"{info.model} on {info.devices.get('target')}, context {info.context_length} tokens")
        _row("draft", f"{info.draft_model} on {info.devices.get('draft')}" if info.draft_model else "none")
        _row("loaded in", f"{service.load_s:.1f} s")
        modes = [settings.speculation, SpeculationMode.OFF] if info.draft_model else [SpeculationMode.OFF]
        with waiting("asking about a clip"):
            responses = await _ask(settings, service, seed, modes)
    for response in responses:
        if response.status_code != httpx.codes.OK:
            note(f"vidspec check: HTTP {response.status_code}: {response.text}")
            return 1
    first, answer, *others = (response.json() for response in responses)
    timings, speculation, usage = first["timings"], answer["speculation"], answer["usage"]
    _row("asked", f"{CAPTION_PROMPT} ({answer['video']['num_frames']} frames, {usage['prompt_tokens']} tokens)")
    _row("answer", _text(answer))
    _row(
        "timing",
        f"video decode {timings['decode_s']:.3f} s, prefill {timings['prefill_s']:.3f} s, "
        f"first token {timings['time_to_first_token_s']:.3f} s, "
        f"then {1000 * timings['time_per_output_token_s']:.1f} ms per token",
    )
    _row("speculation", f"{speculation['mode']}, {speculation['acceptance_rate']:.0%} accepted")
    if settings.model == "bundled":
        _row("truth", caption(sample_scene(seed)))
    is_same = all(_text(other) == _text(answer) for other in others)
    _row("verdict", _verdict(settings, seed, answer, others, is_same=is_same))
    return 0 if is_same else 1


def _verdict(settings: Settings, seed: int, answer: Answer, others: Sequence[Answer], *, is_same: bool) -> str:
    """What it comes to. One clip says little about speed: `bench speed` asks about many."""
    said = ["it works"]
    for other in others:
        alone_s, token_s = (each["timings"]["time_per_output_token_s"] for each in (other, answer))
        if token_s > 0:  # an answer of one token has none
            said.append(f"{alone_s / token_s:.2f}x as fast as the target alone")
        said.append("the same text" if is_same else f"ANOTHER TEXT than the target alone, which says: {_text(other)}")
    if settings.model == "bundled":
        marks = caption_marks(sample_scene(seed), _text(answer))
        said.append(f"{sum(is_right is True for _, is_right in marks)} of {len(marks)} facts right")
    return "; ".join(said)


async def _ask(
    settings: Settings, service: RunningService, seed: int, modes: Sequence[SpeculationMode]
) -> list[httpx.Response]:
    """An answer as the first caller has it, and then one in each mode, with nothing left to compile or to decode."""
    with tempfile.TemporaryDirectory(prefix="vidspec-") as folder:
        clip = Path(folder) / "clip.mp4"
        write_scene(seed, clip)
        services = build_services(settings, service.engine, service.decode_pool.decode, service.metrics, Path(folder))
        transport = httpx.ASGITransport(create_app(services))
        async with httpx.AsyncClient(transport=transport, base_url="http://check", timeout=None) as client:
            content = await asyncio.to_thread(clip.read_bytes)
            found = []
            for mode in [modes[0], *modes]:
                form = {"prompt": CAPTION_PROMPT, "max_tokens": str(_MAX_TOKENS), "speculation": mode.value}
                found.append(await client.post("/v1/video-chat", data=form, files={"video": content}))
            return found


def _text(answer: Answer) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def _row(name: str, value: str) -> None:
    say(f"{name:<12}{value}")
