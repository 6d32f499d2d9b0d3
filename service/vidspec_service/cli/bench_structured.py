"""Compare answers with and without a grammar on the same clips in the same run: speed, and whether they are right.

Plain captions, the same captions under a grammar that allows any text (what masks cost), and descriptions as JSON by
the bundled pair's schema. Exit code 1: the modes did not give the same token ids.
"""

from __future__ import annotations

import argparse
from functools import partial

from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.structured import StructuredOptions, measure_structured, structured_report
from vidspec_service.cli.bench_flags import add_bench_flags, pair_of, run_bench

add_arguments = partial(add_bench_flags, options=StructuredOptions)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    options, pair = options_from_args(StructuredOptions, args), pair_of(args)
    return run_bench(
        args, lambda on_progress: structured_report(options, pair, measure_structured(options, pair, on_progress))
    )
