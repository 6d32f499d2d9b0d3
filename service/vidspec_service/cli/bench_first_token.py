"""Show where the time to the first token goes: upload, decoding, vision tower, prefill; one clip and several at once.

A server is started with the given settings and asked over HTTP for one token per clip, each time about a file that is
new to it. `--plot` draws when each stage worked.
"""

from __future__ import annotations

import argparse
from functools import partial

from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.first_token import FirstTokenOptions, first_token_report, measure_first_tokens
from vidspec_service.cli.bench_flags import add_bench_flags, run_bench
from vidspec_service.cli.bench_serve import server_flags
from vidspec_service.cli.settings_flags import settings_of
from vidspec_service.settings import client_key, engine_config

add_arguments = partial(add_bench_flags, options=FirstTokenOptions, plot="draw each stage as a lane over time")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    settings, options = settings_of(args), options_from_args(FirstTokenOptions, args)
    pair, flags, key = engine_config(settings), server_flags(args), client_key(settings)
    draft = "none" if pair.draft is None else pair.draft.model
    models = f"target {pair.target.model}, draft {draft}, speculation {settings.speculation}"
    return run_bench(
        args, lambda on_progress: first_token_report(measure_first_tokens(options, flags, key, on_progress), models)
    )
