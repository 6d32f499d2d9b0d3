"""The table of commands and `vidspec COMMAND ...` itself, with a suggestion for what was mistyped.

Only the module of the command that was asked for is imported: `vidspec chat` must not wait for the settings.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import NoReturn, Protocol, cast

from vidspec_service import __version__

COMMANDS: Mapping[str, str] = {
    "serve": "load the models and answer over HTTP",
    "serve-ray": "serve from a Ray cluster, with several engines; answers survive the loss of an engine",
    "chat": "ask a running server about a video",
    "batch": "ask a server everything in a file, or one question about every clip of a folder",
    "check": "load the models, answer about one rendered clip, print versions, timings and a verdict",
    "render-clip": "write one of the clips that the bundled models were made for",
    "train-bundled": "train the bundled pair of models",
    "eval-bundled": "measure the bundled pair on held-out clips",
    "bench speed": "compare the modes of decoding with each other and with stock transformers",
    "bench pruning": "compare the ways to choose which video tokens the draft sees",
    "bench compression": "measure lossy compression on the target: accuracy, time, memory",
    "bench first-token": "show where the time to the first token goes, stage by stage",
    "bench structured": "compare answers with and without a grammar: speed and correctness",
    "bench peers": "compare with other engines on the bundled pair's own weights",
    "bench decode": "compare video decoding with other libraries",
    "bench cluster": "simulate a cluster of engines, from times that one engine takes on this machine",
    "bench serve": "put load on a server over HTTP: latencies, goodput, overload, soak",
}
# Flags of vLLM and uvicorn without an equivalent here: a suggestion by similar spelling would mislead.
_FOREIGN_FLAGS: Mapping[str, str] = {
    "--max-num-batched-tokens": "the closest is --prefill-chunk",
    "--tensor-parallel-size": "name the devices: --target-device cuda:0,cuda:1",
    "--data-parallel-size": "see vidspec serve-ray --engines",
    "--device": "name both devices: --target-device, --draft-device",
    "--pipeline-parallel-size": "name the devices: --target-device cuda:0,cuda:1",
    "--target-model": "name the target: --model",
    "--speculative-config": "name the draft: --draft-model",
    "--speculative-model": "name the draft: --draft-model",
    "--num-speculative-tokens": "the number is chosen at run time; see --speculation",
    "--allowed-origins": "see --cors-origins",
    "--allowed-media-domains": "see --video-url-hosts",
    "--uvicorn-log-level": "see --log-level",
    "--disable-log-requests": "see --no-access-log",
    "--download-dir": "set the variable HF_HOME",
    "--hf-token": "set the variable HF_TOKEN",
    "--quantization": "see --target-dtype",
    "--ssl-certfile": "put a proxy for TLS in front",
    "--ssl-keyfile": "put a proxy for TLS in front",
    "--workers": "one server uses all cores; for several, see vidspec serve-ray",
    "--trust-remote-code": "code from a checkpoint is never run",
    "--chat-template": "the checkpoint's own template is used",
    "--limit-mm-per-prompt": "see --max-videos-per-request",
    "--media-io-kwargs": "frames are chosen by a request's num_frames or fps, or --default-num-frames",
    "--mm-processor-kwargs": "frames are chosen by a request's num_frames or fps, or --default-num-frames",
    "--enable-prefix-caching": "it is always on",
    "--enable-chunked-prefill": "it is always on",
    "--enable-auto-tool-choice": "it is always on if the chat template supports tools",
    "--tool-call-parser": "the format of calls follows from the chat template",
}
_DESCRIPTION = "Serve video language models with lossless parallel speculative decoding."


class Command(Protocol):
    """What the module of a command offers; its docstring is the head of its help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; returns the exit code."""


class UsageError(Exception):
    """The command line itself is wrong; exit code 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")


def parse(argv: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """The command and its arguments. Raises UsageError; --help and --version exit with 0."""
    argv = _joined(argv)
    if argv[:1] == ["bench"]:  # without the name of a bench: --help lists them all, anything else is an error
        benches = {name.removeprefix("bench "): of for name, of in COMMANDS.items() if name.startswith("bench ")}
        _parser_of("vidspec bench", "Measure what makes vidspec fast, and its cost.", benches).parse_args(argv[1:])
    top = _parser_of("vidspec", _DESCRIPTION, COMMANDS)
    name = top.parse_args(argv[:1]).command
    if name not in COMMANDS:
        top.error(f"unknown command {name}{_did_you_mean(name, COMMANDS)}")
    command = load_command(name)
    parser = _Parser(
        f"vidspec {name}",
        description=inspect.getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    args, unknown = parser.parse_known_args(argv[1:])
    if unknown:
        _refuse(parser, unknown)
    return command, args


def load_command(name: str) -> Command:
    """The module of a command of the table; a benchmark is an object in the one of all benchmarks."""
    module, _, bench = name.replace("-", "_").partition(" ")
    found = import_module(f"vidspec_service.cli.{module}")
    return cast(Command, found.BENCHES[bench.replace("_", "-")] if bench else found)


def _joined(argv: Sequence[str]) -> list[str]:
    """Every bench is a command of two words."""
    is_bench = list(argv[:1]) == ["bench"] and not "".join(argv[1:2]).startswith("-")
    return [" ".join(argv[:2]), *argv[2:]] if is_bench else list(argv)


def _parser_of(prog: str, description: str, commands: Mapping[str, str]) -> _Parser:
    width = max(map(len, commands)) + 2
    lines = [f"  {name:<{width}}{summary}" for name, summary in commands.items()]
    parser = _Parser(
        prog,
        usage=f"{prog} COMMAND ...",
        description=description,
        epilog="\n".join(["commands:", *lines, "", f"Each command has its own help: {prog} COMMAND --help"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vidspec {__version__}")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _refuse(parser: _Parser, unknown: Sequence[str]) -> NoReturn:
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if not flags:
        parser.error(f"unexpected argument {unknown[0]}")
    if flags[0] in _FOREIGN_FLAGS:
        parser.error(f"{flags[0]} is not a flag here; {_FOREIGN_FLAGS[flags[0]]}")
    known = re.findall(r"--[a-z][\w-]*", parser.format_help())
    parser.error(f"unknown flag {flags[0]}{_did_you_mean(flags[0], known)}")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    names = {each.lstrip("-"): each for each in known}  # dashes would make all flags alike
    close = difflib.get_close_matches(word.lstrip("-"), names, n=1)
    return f"; did you mean {names[close[0]]}?" if close else ""
