"""Measure the bundled pair on held-out test clips: questions, captions, acceptance, and the gates for shipping it.

Exit code 1: a gate is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.loading.files import find_flaw
from vidspec_service.arguments import positive_int, writable_file
from vidspec_service.cli.terminal import note, say
from vidspec_service.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which pair, how many clips, where to."""
    parser.add_argument(
        "--pair", type=Path, metavar="DIR", help="folder with target/ and draft/ (default: the shipped ones)"
    )
    parser.add_argument("--clips", type=positive_int, default=200, metavar="N", help="test clips (default 200)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument(
        "--dtype", default="auto", help="data type of the target, as for `vidspec serve` (default auto)"
    )
    parser.add_argument("--draft-dtype", default="auto", help="of the draft, likewise (default auto)")
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="also write all results to this file")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the tables."""
    target, draft = (args.pair / "target", args.pair / "draft") if args.pair else (BUNDLED_TARGET, BUNDLED_DRAFT)
    for folder in (target, draft):
        if found := find_flaw(folder):
            raise ConfigError(f"{folder} {found}; `vidspec train-bundled` makes a pair")
    from vidspec_models.decoder.placement import resolve_device
    from vidspec_models.training.evaluation import evaluate, format_table, gates

    device = str(resolve_device(args.device, "target"))
    result = evaluate(
        target, draft, num_clips=args.clips, device=device, dtype=args.dtype, draft_dtype=args.draft_dtype
    )
    judged = gates(result)
    try:
        if args.json is not None:  # before it is printed: the reader of a pipe may end early
            report = {**result, "gates": [dataclasses.asdict(gate) for gate in judged]}
            args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    finally:
        say(format_table(result))  # also where the disk is full
    missed = [gate.name for gate in judged if not gate.passed]
    if missed:
        note(f"vidspec eval-bundled: missed {', '.join(missed)}")
    return 1 if missed else 0
