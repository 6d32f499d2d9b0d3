"""Compare answers with and without a grammar on the same clips in the same run: speed, and whether they are right.

Plain captions, the same captions under a grammar that allows any text (what masks cost), and descriptions as JSON by
the bundled pair's schema. Exit code 1: the modes did not give the same token ids.
"""

from __future__ import annotations

import argparse

from vidspec_models.request import SamplingParams
from vidspec_service.bench.common.facts import Provenance
from vidspec_service.bench.common.options import add_options, options_of
from vidspec_service.bench.common.report import Report, Tell
from vidspec_service.bench.structured.report import structured_report
from vidspec_service.bench.structured.run import StructuredOptions, measure_structured
from vidspec_service.cli.bench_flags import add_output_flags, pair_of, run_bench
from vidspec_service.cli.settings_flags import add_settings_flags
from vidspec_service.cli.terminal import note
from vidspec_service.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, what to write, and the settings of the engine."""
    add_options(parser, StructuredOptions)
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling; clip i has N + i (default 0)")
    add_output_flags(parser)
    add_settings_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    if args.temperature < 0:
        raise ConfigError("--temperature must be 0 or more")
    law = SamplingParams(temperature=args.temperature, seed=args.seed)
    options, pair = options_of(StructuredOptions, args, sampling=law), pair_of(args)

    def report(command: str, tell: Tell) -> Report:
        provenance = Provenance.now(command)
        return structured_report(options, pair, measure_structured(options, pair, tell), provenance)

    if run_bench(args, report).figures["identical"] is False:
        note("vidspec bench structured: the modes did not give the same token ids")
        return 1
    return 0
