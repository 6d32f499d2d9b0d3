"""GrammarCheck: tries a grammar in a process of its own.

Compilers have inputs on which they take minutes, or end their process. What clients send is tried in a child first, and
only what compiles there in little time and memory reaches a worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from cachetools import LRUCache

from vidspec_service.api.limits.admission import FairQueue
from vidspec_service.api.schemas.structured_output import Grammar, short
from vidspec_service.errors import CapacityError, InvalidRequest

_CHILD = "vidspec_service.api.grammars.child"
_MOST_AT_ONCE = 2
_MOST_REMEMBERED = 1024
_PATIENCE_S = 20.0  # many times the processor's time that a child may take: only a machine under load needs it
_TOO_COMPLEX = "it takes too much time or memory to compile"


class GrammarCheck:
    """One child for each grammar, callers in rotation; what was checked lately is known. For one event loop."""

    def __init__(self) -> None:
        # Whoever sends many that take their time delays nobody else by more than those that are being tried.
        self._queue = FairQueue(_MOST_AT_ONCE)
        # A thread waits for a child: asyncio's own children never end if a loop is left while one starts.
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="grammar")
        self._faults: LRUCache[bytes, str] = LRUCache(_MOST_REMEMBERED)  # by digest; an empty one is none

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
        trying = asyncio.get_running_loop().run_in_executor(self._threads, _fault, text)
        trying.add_done_callback(lambda _: self._queue.release(caller))
        return await asyncio.shield(trying)  # whoever leaves, the child has its place until it ends, within its limits


def _fault(text: str) -> str:
    command = [sys.executable, "-m", _CHILD]
    try:
        child = subprocess.run(command, input=text.encode(), capture_output=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise CapacityError("The server had no time to compile the grammar; try again.") from None
    return _TOO_COMPLEX if child.returncode else short(child.stdout.decode(errors="replace"))
