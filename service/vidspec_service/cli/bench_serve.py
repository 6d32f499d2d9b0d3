"""Load a server over HTTP with rendered or given clips: latencies, goodput, errors; overload; long runs.

Without --url a server is started for it, with the settings given. Closed load (--concurrency) by default, open load
with --rate. Every file is sent once only, so that no cache of the server helps, unless --repeat-files says otherwise.
Exit code 1: requests were lost, or a soaked server kept files or processes.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from vidspec_service.bench.serve.report import Objectives, has_left_something, num_lost
from vidspec_service.bench.serve.run import ServeOptions, run_load
from vidspec_service.cli.bench_flags import (
    add_number,
    add_output_flags,
    positive,
    require_files,
    require_outputs,
    run_bench,
)
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import note
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings

_DEFAULTS = ServeOptions()
_OWN = ("host", "port", "log_format", "access_log", "upload_dir")  # fixed for a server of our own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask, how much, what counts as good, what to write, and the settings of a server of our own."""
    parser.add_argument("--url", metavar="URL", help="ask this server; else one is started and ended")
    add_number(parser, "--requests", _DEFAULTS.num_requests, "in all")
    add_number(parser, "--concurrency", _DEFAULTS.concurrency, "at once")
    parser.add_argument("--rate", type=positive, metavar="R", help="open load: R arrivals a second, Poisson")
    parser.add_argument(
        "--overload", type=positive, metavar="FACTOR", help="measure the capacity, then offer FACTOR times as much"
    )
    add_number(parser, "--duration-s", _DEFAULTS.duration_s, "of --overload", "S")
    add_number(parser, "--soak", None, "N requests of all sizes, of which many leave early")
    add_number(parser, "--warm-up", None, "requests before --soak, that fill the caches (default a fifth)")
    parser.add_argument(
        "--clip", type=Path, nargs="+", default=[], metavar="FILE", help="send these, not rendered ones"
    )
    add_number(parser, "--clips", _DEFAULTS.num_clips, "to render")
    parser.add_argument("--repeat-files", action="store_true", help="send equal files again: caches may help")
    add_number(parser, "--max-tokens", _DEFAULTS.max_tokens, "per answer")
    add_number(parser, "--frames", None, "of each clip (default: the server's)")
    add_number(parser, "--slo-ttft-s", _DEFAULTS.objectives.ttft_s, "of goodput", "S")
    add_number(parser, "--slo-tpot-s", _DEFAULTS.objectives.tpot_s, "of goodput", "S")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and of who leaves (default 0)")
    add_output_flags(parser, "draw how the latencies spread")
    add_settings_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Load, print, write."""
    from vidspec_service.settings import client_key

    settings = settings_of(args)
    options, flags, key = serve_options(args, settings), server_flags(args), client_key(settings)
    require_outputs(args)
    report = run_bench(args, lambda command, tell: asyncio.run(run_load(options, args.url, flags, key, command, tell)))
    if num_lost(report) or has_left_something(report):
        note("vidspec bench serve: something was lost or left over, see above")
        return 1
    return 0


def serve_options(args: argparse.Namespace, settings: Settings) -> ServeOptions:
    """The options that the flags make; raises ConfigError for what cannot go together."""
    chosen = [f"--{name}" for name in ("rate", "overload", "soak") if getattr(args, name) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} cannot go together")
    if args.soak is not None and args.url is not None:
        raise ConfigError("--soak watches the processes of a server of its own: leave out --url")
    if args.warm_up is not None and args.soak is None:
        raise ConfigError("--warm-up goes with --soak")
    require_files(args.clip)
    return ServeOptions(
        num_requests=args.requests,
        concurrency=args.concurrency,
        rate=args.rate,
        overload=args.overload,
        duration_s=args.duration_s,
        soak=args.soak,
        warm_up=args.warm_up,
        clips=tuple(args.clip),
        num_clips=args.clips,
        has_repeated_files=args.repeat_files,
        max_tokens=args.max_tokens,
        num_frames=args.frames,
        objectives=Objectives(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s, deadline_s=settings.request_timeout_s),
        seed=args.seed,
    )


def server_flags(args: argparse.Namespace) -> list[str]:
    """The settings that were given as flags, for `vidspec serve`; it reads environment and file by itself."""
    flags = [] if args.config is None else ["--config", str(args.config)]
    for name in Settings.model_fields:
        value = getattr(args, name, None)
        if value is None or name in _OWN:
            continue
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags
