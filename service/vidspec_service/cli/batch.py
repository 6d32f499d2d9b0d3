"""Send a server all requests of a file, or one question about every clip of a folder; write the answers to a file.

  vidspec batch requests.jsonl -o answers.jsonl
  vidspec batch clips/ -o answers.jsonl --prompt 'Describe the video.'

Each line of the file is a request in the format of OpenAI's batches; "url" is optional:
  {"custom_id": "a", "url": "/v1/video-chat", "body": {"video": "a.mp4", "prompt": "What happens?"}}
In bodies for OpenAI's routes, write a file as "file:a.mp4". Paths are relative to the folder of the request file.
Answers are written in the order in which they are ready. To continue an interrupted run, repeat the command: it skips
requests that are already answered. Exit code 1: some requests were refused or not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vidspec_service.arguments import add_client_flags, non_negative_float
from vidspec_service.cli.batch_files import (
    STREAMED,
    BatchFileError,
    BatchRequest,
    BatchResult,
    OnResult,
    open_results,
    read_requests,
    requests_for_videos,
)
from vidspec_service.cli.terminal import DISK_FULL, note, waiting

if TYPE_CHECKING:
    from vidspec_service.cli.batch_client import ClientOptions
    from vidspec_service.settings import ClusterSettings

_SUFFIXES = {
    ".3gp", ".asf", ".avi", ".dv", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts",
    ".mxf", ".ogv", ".ts", ".vob", ".webm", ".wmv",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to ask, whom, and where the answers go."""
    parser.add_argument(
        "input", type=Path, nargs="+", metavar="INPUT", help="one .jsonl file, or clips and folders of clips"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="file for the answers, one per line"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the question about each clip")
    parser.add_argument(
        "--body", type=_object, default={}, metavar="JSON", help="additional fields of each clip's request"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="the server (default: start one, with the settings in VIDSPEC_* variables)")
    where.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="start VIDSPEC_ENGINES servers on this Ray cluster, auto or HOST:PORT; paths must be valid on every node",
    )
    add_client_flags(parser)
    parser.add_argument("--at-once", type=_count, default=8, metavar="N", help="requests in flight (default 8)")
    parser.add_argument(
        "--patience-s",
        type=non_negative_float,
        default=600.0,
        metavar="S",
        help="how long to retry while a busy or unreachable server answers no line (default 600)",
    )


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be an object, such as {"max_tokens": 100}')
    if value.get("stream"):
        raise argparse.ArgumentTypeError(STREAMED)
    if "video" in value or "prompt" in value:
        raise argparse.ArgumentTypeError("must not have video or prompt: each clip is asked --prompt")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError("must be 1 to 1024")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Ask what is not answered yet."""
    from vidspec_service.cli.batch_client import ClientOptions, ServerUnreachable
    from vidspec_service.settings import ClusterSettings, client_api_key, load_settings

    is_file = len(args.input) == 1 and args.input[0].suffix == ".jsonl"
    if is_file == (args.prompt is not None) or (is_file and args.body):
        note("vidspec batch: clips need --prompt and may have --body; a .jsonl file allows neither")
        return 2
    clips = [] if is_file else list(dict.fromkeys(_clips(args.input)))
    if not is_file and not clips:
        kinds = ", ".join(sorted(_SUFFIXES))
        note(f"vidspec batch: no clips in {', '.join(map(str, args.input))}; name the files unless they end in {kinds}")
        return 2
    body = {"prompt": args.prompt, **args.body}
    lines = partial(read_requests, args.input[0]) if is_file else partial(requests_for_videos, clips, body)
    settings = load_settings(ClusterSettings, {"api_key_file": args.api_key_file, "ray_address": args.ray_address})
    options = ClientOptions(
        timeout_s=args.timeout_s,
        patience_s=args.patience_s,
        api_key=client_api_key(settings),
        folder=(args.input[0].parent if is_file else Path()).absolute(),
        at_once=args.at_once,
    )
    tally = BatchProgress()
    try:
        num_lines = sum(1 for _ in lines())  # a bad line is reported before the first one is sent
        with open_results(args.output) as results:
            before = [results.answered[line.custom_id] for line in lines() if line.custom_id in results.answered]
            tally.num_good, tally.num_bad = before.count(True), before.count(False)
            if len(before) < num_lines:
                left = (line for line in lines() if line.custom_id not in results.answered)

                def take(answer: BatchResult) -> None:
                    results.add(answer)
                    tally.count(answer.is_success)

                with _sender(args, settings, options, tally) as ask_all, tally:
                    tally.add_task("asking", total=num_lines, completed=len(before))
                    ask_all(left, take)
    except BatchFileError as error:
        note(f"vidspec batch: {error}")
        return 2
    except OSError as error:
        note(f"vidspec batch: {error.filename or args.output}: {error.strerror or error}")
        return 1 if error.errno in DISK_FULL else 2
    except ServerUnreachable as error:
        note(f"vidspec batch: {error}; repeat the command to continue")
        return 1
    note(f"{tally.num_good} answered, {tally.num_bad} refused or failed; {args.output}")
    return 1 if tally.num_bad else 0


def _clips(given: list[Path]) -> Iterator[Path]:
    for path in given:
        if path.is_dir():
            # `Path.rglob` passes over folders that it may not read, and their clips would not be missed.
            below = (Path(folder, name) for folder, _, names in os.walk(path, onerror=_fail) for name in names)
            clips = (each for each in below if each.suffix.lower() in _SUFFIXES)
            # Not a FIFO, whose reader waits for ever. A link to nowhere is told as a clip that is missing.
            yield from sorted(each for each in clips if each.is_file() or not each.exists())
        else:
            yield path


def _fail(error: OSError) -> None:
    raise error


class BatchProgress(Progress):
    """A bar over all lines, on a terminal's stderr only; and how many lines are answered or refused so far."""

    def __init__(self) -> None:
        self.num_good = self.num_bad = 0
        self._has_warned = False
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def warn_once(self, what: str) -> None:
        """A line above the bar, the first time."""
        if not self._has_warned:
            self._has_warned = True
            self.console.print(f"vidspec batch: {what}", markup=False, highlight=False, soft_wrap=True)

    def count(self, is_success: bool) -> None:
        """Count one more answer."""
        self.num_good += is_success
        self.num_bad += not is_success
        self.advance(self.task_ids[0])


@contextmanager
def _sender(
    args: argparse.Namespace, settings: ClusterSettings, options: ClientOptions, tally: BatchProgress
) -> Iterator[Callable[[Iterable[BatchRequest], OnResult], None]]:
    """`BatchClient.send_all` for the server or cluster that is to answer. Raises ConfigError and ServerUnreachable."""
    if args.ray_address is not None:
        from vidspec_service.cli.ray_address import require_ray

        require_ray()
        from vidspec_service.cli import batch_ray

        yield partial(batch_ray.send_all, settings=settings, options=options)
        return
    from vidspec_service.bench.common.server import local_server
    from vidspec_service.cli.batch_client import BatchClient

    with ExitStack() as held:
        url, on_silence = args.url, tally.warn_once
        if url is None:
            with waiting("loading the models"):
                server = held.enter_context(local_server())
            url, on_silence = server.url, lambda what: server.check()  # one that has ended does not come back
        client = BatchClient(url, options, on_silence)
        yield lambda lines, on_result: asyncio.run(client.send_all(lines, on_result))
