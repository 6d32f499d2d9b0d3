"""GrammarCheck: tries a grammar in a process of its own.

Compilers have inputs on which they take minutes, or end their process, and so has what reads GBNF. What clients send is
tried in a child first, and only what is read and compiled there in little time and memory reaches a worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from cachetools import LRUCache

from vidspec_service.api.grammars import fork_server
from vidspec_service.api.limits.admission import FairQueue
from vidspec_service.api.schemas.structured_output import MAX_GRAMMAR, Grammar, short
from vidspec_service.errors import CapacityError, InvalidRequest
from vidspec_service.forking import ForkServer

_MOST_AT_ONCE = 2
_MOST_REMEMBERED = 1024
_MOST_CHARACTERS = 16 * MAX_GRAMMAR  # of all that is remembered
_PATIENCE_S = 20.0  # many times the processor's time that a child may take: only a machine under load needs it
_TOO_COMPLEX = "it takes too much time or memory to compile"


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a grammar."""

    fault: str = ""  # what is wrong with it
    text: str | None = None  # how workers read it, if that is another text


class GrammarCheck:
    """One child for each grammar, callers in rotation; what was checked lately is known. For one event loop."""

    def __init__(self, compiler: ForkedCompiler | None = None) -> None:
        """With a compiler of its own, unless one is given to be shared."""
        # Whoever sends many that take their time delays nobody else by more than those that are being tried.
        self._queue = FairQueue(_MOST_AT_ONCE)
        # A thread waits for a child; and these keep the fork server alive, which dies with the thread that started it.
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="grammar")
        self._compiler = compiler or ForkedCompiler()
        self._found: LRUCache[bytes, Tried] = LRUCache(_MOST_CHARACTERS, getsizeof=_size)  # by digest

    def start(self) -> None:
        """Have the compiler prepare, beside what else starts."""
        self._threads.submit(self._compiler.start)

    def close(self) -> None:
        """End the process beside; nothing can be checked any more."""
        self._compiler.close()
        self._threads.shutdown(wait=False)

    async def check(self, grammar: Grammar, caller: str) -> Grammar:
        """As workers read it.

        Raises InvalidRequest, which says what is wrong and where, or CapacityError if the machine is too busy.
        """
        digest = hashlib.sha256(_sent(grammar)).digest()
        found = self._found.get(digest)
        if found is None:
            found = self._found[digest] = await self._tried(grammar, caller)
        if found.fault:
            raise InvalidRequest(f"{grammar.param}: {found.fault}", param=grammar.param)
        return grammar if found.text is None else replace(grammar, text=found.text, form="llguidance")

    async def _tried(self, grammar: Grammar, caller: str) -> Tried:
        await self._queue.acquire(caller)
        trying = asyncio.get_running_loop().run_in_executor(self._threads, self._compiler.tried, grammar)
        trying.add_done_callback(lambda _: self._queue.release(caller))
        return await asyncio.shield(trying)  # whoever leaves, the child has its place until it ends, within its limits


class ForkedCompiler:
    """A child for each grammar, forked from a process that starts with the first of them at the latest."""

    def __init__(self) -> None:
        self._forks = ForkServer(fork_server.__name__, is_bare=True)

    def start(self) -> None:
        """Prepare, so that the first grammar takes no longer than others; in a thread that stays."""
        self._forks.start()

    def tried(self, grammar: Grammar) -> Tried:
        """What becomes of it; raises CapacityError if the machine is too busy. Blocks: call it in a thread."""
        for _ in range(2):
            try:
                said = self._said(_sent(grammar))
            except TimeoutError:
                break
            except OSError:
                said = b""
            if said:
                return _found(said, grammar)
            self._forks.restart()  # it has died, which only who asks finds out
        raise CapacityError("The server had no time to compile the grammar; try again.")

    def _said(self, sent: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_PATIENCE_S)
            with theirs:
                self._forks.launch(theirs.fileno())
            ours.sendall(sent)
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as answer:
                return answer.read()

    def close(self) -> None:
        """End what was started."""
        self._forks.close()


def _sent(grammar: Grammar) -> bytes:
    return f"{grammar.form}\n{grammar.spelt or grammar.text}".encode()


def _found(said: bytes, grammar: Grammar) -> Tried:
    """What a child says that has begun."""
    if not said.endswith(fork_server.DONE):
        return Tried(_TOO_COMPLEX)
    text, fault = json.loads(said.removeprefix(fork_server.BEGUN))
    if fault or grammar.form == "llguidance":
        return Tried(short(fault))
    is_long = len(text) > MAX_GRAMMAR
    return Tried(f"as Lark it may have {MAX_GRAMMAR} characters") if is_long else Tried(text=text)


def _size(found: Tried) -> int:
    """Of what is remembered: however short, there are not more than so many."""
    return _MOST_CHARACTERS // _MOST_REMEMBERED + len(found.text or "")
