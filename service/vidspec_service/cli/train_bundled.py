"""Train the bundled pair on clips that are rendered during training: tower, target, target under compression, draft.

An interrupted run continues from its newest checkpoint. Minutes are wall-clock time, over all runs together.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.training.options import STAGES, TrainOptions
from vidspec_service.arguments import non_negative_float, non_negative_int
from vidspec_service.errors import ConfigError
from vidspec_service.telemetry import configure_logging

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainOptions)}
_LATER = frozenset(STAGES[STAGES.index("widen") :])  # stages that need no optimiser of an earlier run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of TrainOptions."""
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="folder for target/ and draft/")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/train"),
        metavar="DIR",
        help="folder for checkpoints (default build/train)",
    )
    for stage in STAGES:
        default = _DEFAULTS[f"{stage}_minutes"]
        parser.add_argument(
            f"--{stage}-minutes",
            type=non_negative_float,
            default=default,
            metavar="M",
            help=f"time for this stage (default {default:g})",
        )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="stages to run (default all)")
    parser.add_argument(
        "--from-shipped",
        action="store_true",
        help="start in an empty --work-dir from the installed weights; for --stages widen, harden and distil",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument(
        "--seed", type=non_negative_int, default=0, metavar="N", help="seed of weights and clips (default 0)"
    )
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True, help="continue from a checkpoint"
    )
    parser.add_argument(
        "--compile", dest="compile_models", action=argparse.BooleanOptionalAction, default=True, help="torch.compile"
    )


def run(args: argparse.Namespace) -> int:
    """Train and export."""
    from vidspec_models.decoder.placement import resolve_device
    from vidspec_models.training.stages import train

    configure_logging("info", "text")
    stages = tuple(stage for stage in STAGES if stage in args.stages)
    given = {**vars(args), "stages": stages, "device": str(resolve_device(args.device, "target"))}
    options = TrainOptions(**{name: given[name] for name in _DEFAULTS if name in given})
    for folder in (options.work_dir, options.output_dir):  # before hours of training whose result has nowhere to go
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write into {folder}: {error.strerror}") from error
    if args.from_shipped:
        _reopen_shipped(options)
    for stage in options.stages:
        if missing := [each for each in options.missing_for(stage) if each not in options.stages]:
            remedy = "; or start from the installed weights (--from-shipped)" if stage in _LATER else ""
            raise ConfigError(
                f"stage {stage} begins from stage {missing[0]}, of which {options.work_dir} has no checkpoint: "
                f"add it to --stages{remedy}"
            )
    train(options)
    return 0


def _reopen_shipped(options: TrainOptions) -> None:
    """Raises ConfigError if a run's checkpoints would be thrown away, or for a stage that cannot continue."""
    from vidspec_models.training.export import reopen

    if not set(options.stages) <= _LATER:
        raise ConfigError("--from-shipped goes with --stages widen harden distil: the others need their optimisers")
    try:
        reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    except FileExistsError as error:
        raise ConfigError(str(error)) from error
