"""Ask a running server about a video and read the answer as it is written; without a question, in a conversation.

The answer goes to stdout, progress and the summary to stderr. Exit code 1: the server refused or failed.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vidspec_service.arguments import DEFAULT_PORT, add_client_flags
from vidspec_service.cli.chat_display import ChatProgress, print_chunks
from vidspec_service.cli.terminal import note, printable, printable_json, say

if TYPE_CHECKING:
    from vidspec_service.cli.chat_client import ChatClient

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
# Every other argument is sent as a field of the same name.
NOT_SENT = ("video", "url", "api_key_file", "json", "timeout_s", "field")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Video, question, server, and one flag per field of a request."""
    parser.add_argument("video", type=Path, metavar="VIDEO", help="the video file")
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the question; without it, questions are read from the terminal (or stdin, one a line), and the server "
        "remembers what was said",
    )
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default {DEFAULT_URL})")
    add_client_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the server's complete JSON answer instead")
    answer = parser.add_argument_group("answer")
    answer.add_argument("--max-tokens", type=int, metavar="N", help="maximum tokens of the answer")
    answer.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the checkpoint's own)")
    answer.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling; 1 is off")
    answer.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens; 0 is off")
    answer.add_argument("--seed", type=int, metavar="N", help="the same request and seed give the same text")
    answer.add_argument("--stop", action="append", metavar="TEXT", help="string that ends the answer; may be repeated")
    answer.add_argument("--speculation", choices=("auto", "parallel", "serial", "off"), help="affects speed only")
    answer.add_argument(
        "--compression",
        choices=("none", "v-cast", "vidcom2", "dycoke", "earlytom"),
        help="lossy compression of the video; all but none may change the text",
    )
    answer.add_argument("--compression-ratio", type=float, metavar="R", help="share of the video's tokens to keep")
    answer.add_argument(
        "--field",
        action="append",
        type=_named,
        default=[],
        metavar="NAME=VALUE",
        help="any other field of a request, objects as JSON; may be repeated: "
        '--field response_format=\'{"type": "json_object"}\'',
    )
    frames = parser.add_argument_group("frames")
    frames.add_argument("--fps", type=float, metavar="RATE", help="frames per second of video")
    frames.add_argument("--num-frames", type=int, metavar="N", help="number of evenly spaced frames; not with --fps")
    frames.add_argument("--max-frames", type=int, metavar="N", help="maximum number of frames")
    frames.add_argument("--start-s", type=float, metavar="SECONDS", help="sample from this time on")
    frames.add_argument("--end-s", type=float, metavar="SECONDS", help="sample up to this time")


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def run(args: argparse.Namespace) -> int:
    """Ask once, or have a conversation."""
    from vidspec_service.cli.chat_client import ChatClient, ChatFailed
    from vidspec_service.cli.conversation import Conversation
    from vidspec_service.settings import Settings, client_api_key, load_settings

    fields = {name: value for name, value in vars(args).items() if value is not None and name not in NOT_SENT}
    named: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in args.field:
        named[name].append(value)
    fields |= named
    if named.get("n", ["1"]) != ["1"] and not args.json:
        note("vidspec chat: several answers (n) would be mixed in the stream; add --json to get them whole")
        return 2
    if args.prompt is None and args.json:
        note("vidspec chat: --json needs a PROMPT")
        return 2
    key = client_api_key(load_settings(Settings, {"api_key_file": args.api_key_file}))
    client = ChatClient(args.url, args.timeout_s, key)
    try:
        if args.prompt is None:
            return Conversation(client, args.video, fields).run()
        _ask_once(client, args.video, fields, as_json=args.json)
    except ChatFailed as error:
        note(f"vidspec chat: {printable(str(error))}")
        return 1
    return 0


def _ask_once(client: ChatClient, path: Path, fields: Mapping[str, object], *, as_json: bool) -> None:
    progress = ChatProgress()
    with progress.sending(path) as video, progress:
        if as_json:
            answer = client.ask(video, fields)
            progress.stop()
            say(printable_json(answer))
        else:
            print_chunks(client.stream(video, fields), progress)
