"""Compare with other engines on the bundled pair's own weights, on the same prompts in the same run.

ik_llama.cpp, OpenVINO GenAI and ONNX Runtime, alone and with speculation, and stock transformers, alone and with its
assisted generation. Needs the packages of 'vidspec[peers]'.
"""

from __future__ import annotations

import argparse
from functools import partial

from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.peers.report import peers_report
from vidspec_service.bench.peers.run import PeersOptions, measure_peers
from vidspec_service.cli.bench_flags import add_bench_flags, pair_of, run_bench

add_arguments = partial(add_bench_flags, options=PeersOptions, plot="draw the speeds")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    options, pair = options_from_args(PeersOptions, args), pair_of(args)
    return run_bench(args, lambda on_progress: peers_report(measure_peers(options, pair, on_progress)))
