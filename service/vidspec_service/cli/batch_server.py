"""A server of `vidspec batch`'s own: it runs as long as there is something to ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from vidspec_service.decoding.isolation.sandbox import dies_with
from vidspec_service.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OwnServer:
    """One that is ready."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def own_server() -> Iterator[OwnServer]:
    """With the settings in VIDSPEC_* variables, until the end of the block, or of this process. Raises ConfigError."""
    command = [sys.executable, "-m", "vidspec_service", "serve", "--port", "0", "--log-format", "json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(dies_with, os.getpid()),
    ) as server:
        try:
            assert server.stderr is not None
            url = _ready(server.stderr)
            reader = threading.Thread(target=deque, args=(server.stderr, 0))  # which keeps nothing
            reader.start()
            try:
                yield OwnServer(url, server)
            finally:
                server.terminate()
                reader.join()
        finally:
            server.terminate()


def _ready(log: Iterator[str]) -> str:
    line = ""
    for line in log:
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "ready":
            return str(event["url"])
        if event.get("event") == "cannot start":
            raise ConfigError(event["reason"])
    raise ConfigError(f"the server ended before it was ready; its last words: {line.strip() or 'none'}")
