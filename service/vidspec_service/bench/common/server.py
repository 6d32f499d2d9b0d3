"""A server of our own that runs until the end of a `with` block; and clips that are new to a server each time."""

from __future__ import annotations

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from vidspec_service.errors import ConfigError
from vidspec_service.forking import die_with_parent

ROUTE = "/v1/video-chat"
_EBML = b"\x1aE\xdf\xa3"  # Matroska, WebM
_COMMAND = (sys.executable, "-m", "vidspec_service", "serve")
_FIXED = ("--port", "0", "--log-format", "json", "--log-level", "info", "--no-access-log")  # `ready` is logged as info
_START_TIMEOUT_S = 1800.0  # enough to load a large model's weights from a network disk
_END_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that is ready."""

    url: str
    process: subprocess.Popen[str]
    log_tail: deque[str]  # the last line of its log

    def check(self) -> None:
        """Raises ConfigError with the last line of the server's log if the server has exited."""
        if (code := self.process.poll()) is not None:
            raise ConfigError(f"the server ended with code {code}: {self.log_tail[0]}")


@contextmanager
def local_server(flags: Sequence[str] = ()) -> Iterator[LocalServer]:
    """Run a server with these flags and the VIDSPEC_* variables until the block, or this process, ends.

    Raises ConfigError with the last line of the server's log if it does not start, or exits with an error.
    """
    process = subprocess.Popen(
        [*_COMMAND, *flags, *_FIXED],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,  # a terminal's Ctrl-C is for us
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    url, log_tail = Future[str](), deque(["it logged nothing"], maxlen=1)
    reader = threading.Thread(target=_read, args=(process.stderr, log_tail, url), daemon=True)
    reader.start()
    try:
        yield LocalServer(_when_ready(url, log_tail), process, log_tail)
    finally:
        process.terminate()
        try:
            code = process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        reader.join(_END_TIMEOUT_S)
    if code not in (0, -signal.SIGTERM):  # SIGTERM kills a server that has not yet installed its handler
        raise ConfigError(f"the server ended with code {code}: {log_tail[0]}")


def _when_ready(url: Future[str], log_tail: deque[str]) -> str:
    try:
        return url.result(_START_TIMEOUT_S)
    except TimeoutError:
        raise ConfigError(f"the server was not ready within {_START_TIMEOUT_S:g} s: {log_tail[0]}") from None


def _read(log: IO[str], log_tail: deque[str], url: Future[str]) -> None:
    """Read the log to its end: the server would block on a full pipe."""
    with log:
        for line in log:
            event = _event(line)
            log_tail.append(event["reason"] if event.get("event") == "cannot start" else line.strip())
            if event.get("event") == "ready" and not url.done():
                url.set_result(event["url"])
    if not url.done():
        url.set_exception(ConfigError(f"the server did not start: {log_tail[0]}"))


def _event(line: str) -> dict[str, Any]:
    """The event in a log line; empty if the line is not an event."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def cycle_clips(clips: Sequence[bytes], *, is_repeated: bool) -> Iterator[bytes]:
    """Repeat the clips without end; unless `is_repeated`, append a serial number, so that no file is sent twice.

    The number is in a Matroska void element or an MP4 free box, which players skip. Files of other formats get the free
    box, which lies behind the end that their own format marks.
    """
    for number, clip in enumerate(itertools.cycle(clips)):
        void, free = struct.pack(">BBQ", 0xEC, 0x88, number), struct.pack(">I4sQ", 16, b"free", number)
        yield clip if is_repeated else clip + (void if clip[:4] == _EBML else free)
