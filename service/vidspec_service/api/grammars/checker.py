"""GrammarChecker: compiles each grammar on trial, in a process of its own.

On some inputs the grammar compiler and the reader of GBNF take minutes, or end their process. So each grammar of a
client is tried in a child first; only what is read and compiled there in little time and memory reaches a worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from cachetools import LRUCache

from vidspec_service.api.grammars import fork_server
from vidspec_service.api.grammars.grammar import MAX_GRAMMAR, Grammar, short
from vidspec_service.api.limits.admission import FairQueue
from vidspec_service.errors import CapacityError, InvalidRequest
from vidspec_service.forking import ForkServer

_MAX_AT_ONCE = 2
_MAX_REMEMBERED = 1024
_MAX_CHARACTERS = 16 * MAX_GRAMMAR  # of all remembered grammars together
_TIMEOUT_S = 20.0  # many times the CPU time that a child may take: only a machine under load needs it
_KILLED = b"%d" % -signal.SIGKILL  # how a child ends that the kernel takes when memory runs out
_TOO_COMPLEX = "it takes too much time or memory to compile"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of compiling a grammar on trial."""

    error: str = ""  # what is wrong with it
    text: str | None = None  # the grammar as workers read it, if that is another text


class GrammarChecker:
    """Compiles each grammar in a child, callers in rotation; remembers recent results. For one event loop."""

    def __init__(self, forks: ForkServer | None = None) -> None:
        """Starts a fork server of its own with the first grammar at the latest, unless one is given to be shared."""
        # A caller with many slow grammars delays others only by the grammars that are being tried.
        self._queue = FairQueue(_MAX_AT_ONCE)
        # Each thread waits for one child. The threads stay: the fork server dies with the thread that started it.
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="grammar")
        self._forks = forks or ForkServer(fork_server.__name__, is_bare=True)
        self._results: LRUCache[bytes, CheckResult] = LRUCache(_MAX_CHARACTERS, getsizeof=_size)  # by digest

    def start(self) -> None:
        """Start the fork server in a thread, while the rest of the service starts: no grammar need wait for it."""
        self._threads.submit(self._forks.start)

    def close(self) -> None:
        """End the fork server; nothing can be checked any more."""
        self._forks.close()
        self._threads.shutdown(wait=False)

    async def check(self, grammar: Grammar, caller: str) -> Grammar:
        """The grammar as workers read it.

        Raises InvalidRequest, which says what is wrong and where, or CapacityError if the machine is too busy.
        """
        digest = hashlib.sha256(_message(grammar)).digest()
        result = self._results.get(digest)
        if result is None:
            result = self._results[digest] = await self._in_turn(grammar, caller)
        if result.error:
            raise InvalidRequest(f"{grammar.param}: {result.error}", param=grammar.param)
        return grammar if result.text is None else replace(grammar, text=result.text, form="llguidance")

    async def _in_turn(self, grammar: Grammar, caller: str) -> CheckResult:
        await self._queue.acquire(caller)
        trying = asyncio.get_running_loop().run_in_executor(self._threads, self.check_in_child, grammar)

        def end(trying: asyncio.Future[CheckResult]) -> None:
            self._queue.release(caller)
            _ = trying.cancelled() or trying.exception()  # asyncio logs exceptions that nobody has retrieved

        trying.add_done_callback(end)
        return await asyncio.shield(trying)  # if the client leaves, the child keeps its slot until it ends

    def check_in_child(self, grammar: Grammar) -> CheckResult:
        """Compile a grammar in a child; raises CapacityError if the machine is too busy. Blocks the thread."""
        for _ in range(2):
            try:
                output = self._ask_child(_message(grammar))
            except TimeoutError:
                break
            except OSError:
                continue
            if output is not None:
                return _parse_result(output, grammar)
        raise CapacityError("The server had no time or memory to compile the grammar; try again.")

    def _ask_child(self, message: bytes) -> bytes | None:
        """What a child has written when it ends; None if it or its fork server was killed, as when memory runs out."""
        (ours, theirs), (life, its_end) = socket.socketpair(), socket.socketpair()
        with ours, life:  # closing `life` kills the child
            for each in (ours, life):
                each.settimeout(_TIMEOUT_S)
            with theirs, its_end:
                self._forks.launch(theirs.fileno(), its_end.fileno())
            ours.sendall(message)
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as output:
                written = output.read()
            return written if life.recv(64) not in (_KILLED, b"") else None


def _message(grammar: Grammar) -> bytes:
    return f"{grammar.form}\n{grammar.spelt or grammar.text}".encode()


def _parse_result(output: bytes, grammar: Grammar) -> CheckResult:
    """The result in the output of a child that has ended."""
    if not output.endswith(fork_server.DONE):
        return CheckResult(_TOO_COMPLEX)
    text, error = json.loads(output)
    if error or grammar.form == "llguidance":
        return CheckResult(short(error))
    if len(text) > MAX_GRAMMAR:
        return CheckResult(f"as Lark it may have at most {MAX_GRAMMAR} characters")
    return CheckResult(text=text)


def _size(result: CheckResult) -> int:
    """Characters that a result counts for: a minimum bounds the number of results to _MAX_REMEMBERED."""
    return _MAX_CHARACTERS // _MAX_REMEMBERED + len(result.text or "")
