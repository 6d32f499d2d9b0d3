"""GrammarCheck: tries a grammar in a process of its own.

Compilers have inputs on which they take minutes, or end their process. What clients send is tried in a child first, and
only what compiles there in little time and memory reaches a worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from cachetools import LRUCache

from vidspec_service.api.grammars import fork_server
from vidspec_service.api.limits.admission import FairQueue
from vidspec_service.api.schemas.structured_output import Grammar, short
from vidspec_service.errors import CapacityError, InvalidRequest
from vidspec_service.forking import ForkServer

_MOST_AT_ONCE = 2
_MOST_REMEMBERED = 1024
_PATIENCE_S = 20.0  # many times the processor's time that a child may take: only a machine under load needs it
_TOO_COMPLEX = "it takes too much time or memory to compile"


class Compiler(Protocol):
    """Says what is wrong with a grammar, in a thread."""

    def start(self) -> None:
        """Prepare, so that the first grammar takes no longer than others; in a thread that stays."""

    def fault(self, text: str) -> str:
        """Empty if nothing is; raises CapacityError if the machine is too busy."""

    def close(self) -> None:
        """End what was started."""


class GrammarCheck:
    """One child for each grammar, callers in rotation; what was checked lately is known. For one event loop."""

    def __init__(self, compiler: Compiler | None = None) -> None:
        """With a process to fork children from, unless another compiler is given."""
        # Whoever sends many that take their time delays nobody else by more than those that are being tried.
        self._queue = FairQueue(_MOST_AT_ONCE)
        # A thread waits for a child; and these keep the fork server alive, which dies with the thread that started it.
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="grammar")
        self._compiler = compiler or ForkedCompiler()
        self._faults: LRUCache[bytes, str] = LRUCache(_MOST_REMEMBERED)  # by digest; an empty one is none

    def start(self) -> None:
        """Have the compiler prepare, beside what else starts."""
        self._threads.submit(self._compiler.start)

    def close(self) -> None:
        """End the process beside; nothing can be checked any more."""
        self._compiler.close()
        self._threads.shutdown(wait=False)

    async def check(self, grammar: Grammar, caller: str) -> None:
        """Raises InvalidRequest, which says what is wrong and where, or CapacityError if the machine is too busy."""
        text = grammar.spelt or grammar.text
        digest = hashlib.sha256(text.encode()).digest()
        fault = self._faults.get(digest)
        if fault is None:
            fault = self._faults[digest] = await self._tried(text, caller)
        if fault:
            raise InvalidRequest(f"{grammar.param}: {fault}", param=grammar.param)

    async def _tried(self, text: str, caller: str) -> str:
        await self._queue.acquire(caller)
        trying = asyncio.get_running_loop().run_in_executor(self._threads, self._compiler.fault, text)
        trying.add_done_callback(lambda _: self._queue.release(caller))
        return await asyncio.shield(trying)  # whoever leaves, the child has its place until it ends, within its limits


class ForkedCompiler:
    """A child for each grammar, forked from a process that starts with the first of them at the latest."""

    def __init__(self) -> None:
        self._forks = ForkServer(fork_server.__name__, is_bare=True)

    def start(self) -> None:
        """See `Compiler`."""
        self._forks.start()

    def fault(self, text: str) -> str:
        """See `Compiler`."""
        for _ in range(2):
            try:
                said = self._said(text.encode())
            except TimeoutError:
                break
            except OSError:
                said = b""
            if said:
                return short(said[1:].decode(errors="replace")) if said.endswith(fork_server.DONE) else _TOO_COMPLEX
            self._forks.restart()  # it has died, which only who asks finds out
        raise CapacityError("The server had no time to compile the grammar; try again.")

    def _said(self, text: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_PATIENCE_S)
            with theirs:
                self._forks.launch(theirs.fileno())
            ours.sendall(text)
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as answer:
                return answer.read()

    def close(self) -> None:
        """See `Compiler`."""
        self._forks.close()
