"""Put load on a server over HTTP with rendered or given clips: latencies, goodput, errors; overload; long runs.

Without --url, a server is started with the given settings. The load is closed (--concurrency) by default, open with
--rate. Unless --repeat-files is given, every file is sent only once, so that the server's caches do not help.
Exit code 1: requests were lost, or after --soak the server still had files or processes left.
"""

from __future__ import annotations

import argparse
from functools import partial

from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.serve.run import ServeOptions, measure_serving
from vidspec_service.cli.bench_flags import add_bench_flags, run_bench
from vidspec_service.cli.settings_flags import settings_of
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings, client_key

_FIXED = ("host", "port", "log_level", "log_format", "access_log", "upload_dir")  # settings of a server of our own


add_arguments = partial(add_bench_flags, options=ServeOptions, plot="draw the distribution of the latencies")


def run(args: argparse.Namespace) -> int:
    """Load, print, write."""
    settings = settings_of(args)
    options, flags, key = serve_options(args, settings), server_flags(args), client_key(settings)
    return run_bench(args, lambda on_progress: measure_serving(options, flags, key, on_progress))


def serve_options(args: argparse.Namespace, settings: Settings) -> ServeOptions:
    """The options that the flags make; raises ConfigError for what cannot go together."""
    chosen = [f"--{name}" for name in ("rate", "overload", "soak") if getattr(args, name) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} cannot go together")
    if args.soak is not None and args.url is not None:
        raise ConfigError("--soak watches the processes of a server that it starts itself: leave out --url")
    if args.warm_up is not None and args.soak is None:
        raise ConfigError("--warm-up needs --soak")
    return options_from_args(ServeOptions, args, deadline_s=settings.request_timeout_s)


def server_flags(args: argparse.Namespace) -> list[str]:
    """The settings that were given as flags, for `vidspec serve`; it reads environment and file by itself.

    Raises ConfigError for those that are fixed.
    """
    flags = [] if args.config is None else ["--config", str(args.config)]
    for name in Settings.model_fields:
        value = getattr(args, name, None)
        if value is None:
            continue
        flag = name.replace("_", "-")
        if name in _FIXED:
            raise ConfigError(f"--{flag} is fixed for a server that a benchmark starts: leave it out")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", *(value if isinstance(value, list) else [str(value)])]
    return flags
