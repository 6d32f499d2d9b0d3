"""Load a server over HTTP with rendered or given clips: latencies, goodput, errors; overload; long runs.

Without --url a server is started for it, with the settings given. Closed load (--concurrency) by default, open load
with --rate. Every file is sent once only, so that no cache of the server helps, unless --repeat-files says otherwise.
Exit code 1: requests were lost, or a soaked server kept files or processes.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from vidspec_service.bench.serve.options import ServeOptions
from vidspec_service.cli.bench_output import command_line, deliver, progress, require_files, require_outputs
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import note
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings

_DEFAULTS = ServeOptions()
_OWN = ("host", "port", "log_format", "access_log", "upload_dir")  # fixed for a server of our own
_POSITIVE = (
    "requests",
    "concurrency",
    "rate",
    "overload",
    "duration_s",
    "soak",
    "warm_up",
    "clips",
    "max_tokens",
    "frames",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask, how much, what counts as good, what to write, and the settings of a server of our own."""
    parser.add_argument("--url", metavar="URL", help="ask this server; else one is started and ended")
    parser.add_argument("--requests", type=int, default=_DEFAULTS.num_requests, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--concurrency", type=int, default=_DEFAULTS.concurrency, metavar="N", help="at once (default %(default)s)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="open load: R arrivals a second, Poisson")
    parser.add_argument(
        "--overload", type=float, metavar="FACTOR", help="measure the capacity, then offer FACTOR times as much"
    )
    parser.add_argument(
        "--duration-s",
        type=float,
        default=_DEFAULTS.duration_s,
        metavar="S",
        help="of --overload (default %(default)g)",
    )
    parser.add_argument("--soak", type=int, metavar="N", help="N requests of all sizes, of which many leave early")
    parser.add_argument(
        "--warm-up", type=int, metavar="N", help="requests before --soak, that fill the caches (default a fifth)"
    )
    parser.add_argument(
        "--clip", type=Path, nargs="+", default=[], metavar="FILE", help="send these, not rendered ones"
    )
    parser.add_argument(
        "--clips", type=int, default=_DEFAULTS.num_clips, metavar="N", help="to render (default %(default)s)"
    )
    parser.add_argument("--repeat-files", action="store_true", help="send equal files again: caches may help")
    parser.add_argument(
        "--max-tokens", type=int, default=_DEFAULTS.max_tokens, metavar="N", help="per answer (default %(default)s)"
    )
    parser.add_argument("--frames", type=int, metavar="N", help="of each clip (default: the server's)")
    for name, default in (("ttft", _DEFAULTS.slo_ttft_s), ("tpot", _DEFAULTS.slo_tpot_s)):
        parser.add_argument(
            f"--slo-{name}-s", type=float, default=default, metavar="S", help="of goodput (default %(default)g)"
        )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and of who leaves (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here, too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw how the latencies spread")
    add_settings_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Load, print, write."""
    from vidspec_service.bench.serve.output import renderables, save_plot
    from vidspec_service.bench.serve.running import run_load
    from vidspec_service.settings import client_key

    settings = settings_of(args)
    options = serve_options(args, settings)
    require_outputs(args)
    with progress() as tell:
        report = asyncio.run(
            run_load(options, args.url, server_flags(args), client_key(settings), command_line(), tell)
        )
    deliver(args, report, renderables, save_plot)
    if report.num_lost or (report.soak is not None and report.soak.has_left_something):
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
    for name in _POSITIVE:
        if (value := getattr(args, name)) is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
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
        slo_ttft_s=args.slo_ttft_s,
        slo_tpot_s=args.slo_tpot_s,
        deadline_s=settings.request_timeout_s,
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
