"""`vidspec bench NAME`: one function per benchmark, whose docstring is the head of its help."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from vidspec_models.request import Compression, SpeculationMode
from vidspec_models.synthetic.recipe import SHAPES
from vidspec_service.arguments import plot_file, writable_file
from vidspec_service.bench.cluster.run import ClusterOptions, measure_cluster
from vidspec_service.bench.common.environment import Provenance
from vidspec_service.bench.common.options import add_options, options_from_args
from vidspec_service.bench.common.report import OnProgress, Report, as_text
from vidspec_service.bench.compression.options import CompressionOptions
from vidspec_service.bench.compression.report import compression_report
from vidspec_service.bench.compression.run import measure_compression
from vidspec_service.bench.decode.run import DecodeOptions, measure_decoding
from vidspec_service.bench.first_token import FirstTokenOptions, first_token_report, measure_first_tokens
from vidspec_service.bench.peers.report import peers_report
from vidspec_service.bench.peers.run import PeersOptions, measure_peers
from vidspec_service.bench.pruning.options import PruningOptions
from vidspec_service.bench.serve.run import ServeOptions, measure_serving
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.bench.speed.report import speed_report
from vidspec_service.bench.speed.run import measure_speed
from vidspec_service.bench.structured import StructuredOptions, measure_structured, structured_report
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import note, progress
from vidspec_service.engine.cgroups import num_cores
from vidspec_service.engine.config import EngineConfig
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings, client_api_key, engine_config
from vidspec_service.settings.derived import BUNDLED
from vidspec_service.telemetry import configure_logging

_FIXED = ("host", "port", "log_level", "log_format", "access_log", "upload_dir")  # settings of a server of our own
# Settings that an engine is made of: those of its own name, and what its workers and DyCoke are given.
_OF_ENGINES = {field.name for field in fields(EngineConfig)} | {
    name for name in Settings.model_fields if re.match(r"(draft|target|dycoke)_|(model|revision)$", name)
}
_OF_CLIENTS = ("--config", "--api-key-file", "--request-timeout-s")  # settings that whoever asks a server needs, too


class Bench:
    """The command of a benchmark; the docstring of `measure` is the head of its help."""

    def __init__(
        self,
        measure: Callable[[argparse.Namespace, OnProgress], Report],
        options: type,
        plot: str | None = None,
        timeline: str | None = None,
        *,
        has_settings: bool = True,
    ) -> None:
        """`measure` checks the flags, then measures; it raises ConfigError and EngineError.

        `options` are flags; `plot` and `timeline` say what the flags of these names draw.
        """
        self.__doc__ = measure.__doc__
        self.measure = measure
        self._options = options
        self._plot, self._timeline = plot, timeline
        self._has_settings = has_settings

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """What to measure, what to write, and the settings of what is measured."""
        if self._timeline is not None:
            parser.add_argument("--timeline", type=plot_file, metavar="FILE.png", help=self._timeline)
        add_options(parser, self._options)
        parser.add_argument("--json", type=writable_file, metavar="FILE", help="also write all results to this file")
        if self._plot is not None:
            parser.add_argument("--plot", type=plot_file, metavar="FILE.png", help=self._plot)
        if self._has_settings:
            add_settings_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Measure with a progress bar, write the files that flags name, print the report; returns the exit code."""
        if self._has_settings:  # before the bar, which takes the place of stderr
            configure_logging("warning", settings_of(Settings, args).log_format)
        with progress() as on_progress:
            provenance = Provenance.now(as_text(shlex.join(["vidspec", *sys.argv[1:]])))
            report = replace(self.measure(args, on_progress), provenance=provenance)
        try:
            report.write(vars(args))  # before it is printed: the reader of a pipe may end early
        finally:
            report.show()  # also where the disk is full
        if report.failure is not None:
            note(f"vidspec bench {report.bench}: {report.failure}")
            return 1
        return 0


def pair_of(args: argparse.Namespace, *measured: str) -> EngineConfig:
    """The engine with its draft, whatever `speculation` is set to: requests name their mode. Logs warnings only.

    Raises ConfigError for flags that would change nothing: settings of a server, and those that are `measured`.
    """
    used = _OF_ENGINES - {"speculation", *measured}
    for name in Settings.model_fields:
        if name not in used and getattr(args, name, None) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} changes nothing in this benchmark: leave it out")
    update = {"speculation": SpeculationMode.AUTO, "log_level": "warning"}
    return engine_config(settings_of(Settings, args).model_copy(update=update))


def bench_cluster(args: argparse.Namespace, on_progress: OnProgress) -> Report:
    """Simulate a cluster of engines, from times of one engine on this machine: routing, load, lost engines, scaling.

    One engine is started and measured. Everything else is a discrete-event simulation, which leaves networks out.
    """
    return measure_cluster(options_from_args(ClusterOptions, args), pair_of(args), on_progress)


def bench_compression(args: argparse.Namespace, on_progress: OnProgress) -> Report:
    """Measure compression on the target: what fewer video tokens cost in accuracy and save in time and memory.

    The target answers alone and greedily about rendered test clips whose content is known. Each configuration runs
    in a process of its own. DyCoke's L and P come from --dycoke-layer and --dycoke-hide-ratio; its K is chosen to
    keep the share in --ratios, but always at least a quarter of the tokens.
    """
    if settings_of(Settings, args).compression is not Compression.NONE:
        raise ConfigError("bench compression compares with and without compression: leave out --compression")
    pair = pair_of(args)
    options, target = options_from_args(CompressionOptions, args, dycoke=pair.dycoke), pair.target
    threads = target.threads or num_cores()
    found, placement = measure_compression(options, target.spec("target"), threads, on_progress)
    return compression_report(options, found, placement, target.model, threads)


def bench_decode(args: argparse.Namespace, on_progress: OnProgress) -> Report:
    """Time vidspec's decoding, OpenCV, torchcodec and decord, as far as they are installed, on the same frames.

    Each library is measured in a process of its own, with its own defaults; the report says how its frames differ.
    """
    return measure_decoding(options_from_args(DecodeOptions, args), on_progress)


def bench_first_token(args: argparse.Namespace, on_progress: OnProgress) -> Report:
    """Show where the time to the first token goes: upload, decoding, vision tower, prefill; one clip, several at once.

    A server is started with the given settings and asked over HTTP for one token per clip, each time about a file
    that is new to it. `--plot` draws when each stage worked.
    """
    settings, options = settings_of(Settings, args), options_from_args(FirstTokenOptions, args)
    pair = engine_config(settings)
    draft = "none" if pair.draft is None else pair.draft.model
    models = f"target {pair.target.model}, draft {draft}, speculation {settings.speculation}"
    found = measure_first_tokens(options, server_flags(args), client_api_key(settings), on_progress)
    return first_token_report(found, models)


def bench_peers(args: argparse.Namespace, on_progress: OnProgress) -> Report:
    """Compare with other engines on the bundled pair's own weights, on the same prompts in the same run.

    ik_llama.cpp, OpenVINO GenAI and ONNX Runtime, alone and with speculation, and stock transformers, alone and
    with its assisted generation. Needs the packages of 'vidspec[peers]'.
    """
    options, pair = options_from_args(PeersOptions, args), pair_of(args, "target_dtype", "draft_dtype")
    return peers_report(measure_peers(options, pair, on_progress))


def bench_pruning(args: argparse.Namespace, on_progress: OnProgress) -> Report:
    """Compare the ways to choose which video tokens the draft sees: acceptance on the target's own text, time, speed.

    Acceptance is exact and needs no engine: the draft follows the target's greedy text in one forward. Tokens per
    second are predicted from it by the speed model, or measured with --engine (captions).
    """
    options, pair = options_from_args(PruningOptions, args), pair_of(args, "preservation", "prune_ratio")
    from vidspec_service.bench.pruning.run import measure_pruning  # torch: not before flags are known to be right

    return measure_pruning(options, pair, on_progress)


def bench_serve(args: argparse.Namespace, on_progress: OnProgress) -> Report:
    """Put load on a server over HTTP with rendered or given clips: latencies, goodput, errors; overload; long runs.

    Without --url, a server is started with the given settings. The load is closed (--concurrency) by default, open
    with --rate. Unless --repeat-files is given, every file is sent only once, so that the server's caches do not
    help. Exit code 1: requests were lost, or after --soak the server still had files or processes left.
    """
    settings = settings_of(Settings, args)
    options = serve_options(args, settings)
    return measure_serving(options, server_flags(args), client_api_key(settings), on_progress)


def serve_options(args: argparse.Namespace, settings: Settings) -> ServeOptions:
    """The options that the flags make; raises ConfigError for what cannot go together."""
    chosen = [f"--{name}" for name in ("rate", "overload", "soak") if getattr(args, name) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} cannot go together")
    if args.soak is not None and args.url is not None:
        raise ConfigError("--soak watches the processes of a server that it starts itself: leave out --url")
    unused = [name for name in server_flags(args) if name.startswith("--") and name not in _OF_CLIENTS]
    if args.url is not None and unused:
        raise ConfigError(f"--url measures a server that has settings of its own: leave out {unused[0]}")
    if args.warm_up is not None and args.soak is None:
        raise ConfigError("--warm-up needs --soak")
    if args.duration_s is not None and args.overload is None:
        raise ConfigError("--duration-s needs --overload; other loads end with --requests")
    if args.concurrency is not None and args.rate is not None:
        raise ConfigError("--rate sends each request when it is due, however many there are: leave out --concurrency")
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


def bench_speed(args: argparse.Namespace, on_progress: OnProgress) -> Report:
    """Compare the modes of decoding and stock transformers on the same prompts in the same run.

    Every prompt goes through all modes before the next one does; speed-ups are relative to `off`, the target alone
    on all cores. Exit code 1: the modes did not give the same token ids.
    """
    options = options_from_args(SpeedOptions, args)
    if args.timeline is not None and Mode.PARALLEL not in options.modes:
        raise ConfigError("--timeline shows a request in mode parallel, but --modes does not include it")
    if not options.is_synthetic and (args.shape is not None or args.acceptance is not None):
        raise ConfigError("--shape and --alpha need --random-weights")
    pair = _named(options, pair_of(args))
    return speed_report(options, pair, measure_speed(options, pair, on_progress))


def _named(options: SpeedOptions, pair: EngineConfig) -> EngineConfig:
    """The pair with the names that the report gives its models."""
    if not options.is_synthetic:
        return pair
    if pair.target.model != BUNDLED or pair.draft is None or pair.draft.model != BUNDLED:
        raise ConfigError("--random-weights makes its own models: leave out --model and --draft-model")
    shapes = SHAPES[options.shape]
    return replace(
        pair,
        target=replace(pair.target, model=f"random weights, shape of {shapes.target.source}"),
        draft=replace(pair.draft, model=f"random weights, shape of {shapes.draft.source}"),
    )


def bench_structured(args: argparse.Namespace, on_progress: OnProgress) -> Report:
    """Compare answers with and without a grammar on the same clips in the same run: speed, and whether they are right.

    Plain captions, the same captions under a grammar that allows any text (what masks cost), and descriptions as
    JSON by the bundled pair's schema. Exit code 1: the modes did not give the same token ids.
    """
    options, pair = options_from_args(StructuredOptions, args), pair_of(args)
    return structured_report(options, pair, measure_structured(options, pair, on_progress))


BENCHES: Mapping[str, Bench] = {
    "speed": Bench(bench_speed, SpeedOptions, "draw the speed-ups", "draw when each worker worked on one request"),
    "pruning": Bench(bench_pruning, PruningOptions, "draw acceptance over ratio"),
    "compression": Bench(bench_compression, CompressionOptions, "draw accuracy against time and memory"),
    "first-token": Bench(bench_first_token, FirstTokenOptions, "draw each stage as a lane over time"),
    "structured": Bench(bench_structured, StructuredOptions),
    "peers": Bench(bench_peers, PeersOptions, "draw the speeds"),
    "decode": Bench(bench_decode, DecodeOptions, "draw the times", has_settings=False),
    "cluster": Bench(bench_cluster, ClusterOptions, "draw goodput and time to the first token over load"),
    "serve": Bench(bench_serve, ServeOptions, "draw the distribution of the latencies"),
}
