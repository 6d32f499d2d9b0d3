"""GrammarCheck: whether a grammar can be followed, known before its request costs anything."""

from __future__ import annotations

import asyncio
import hashlib

from cachetools import LRUCache
from llguidance import LLMatcher, LLTokenizer

from vidspec_service.api.schemas.structured_output import Grammar, short
from vidspec_service.errors import InvalidRequest

_MOST_AT_ONCE = 2
_MOST_REMEMBERED = 1024


class GrammarCheck:
    """Compiles in threads, which leaves the event loop running; llguidance's own limits bound how long that takes.

    A grammar that was checked lately is not compiled again. For one event loop.
    """

    def __init__(self) -> None:
        self._tokens = LLTokenizer("byte")  # one for each byte: whether a grammar is one does not hang on the model
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)
        self._faults: LRUCache[bytes, str] = LRUCache(_MOST_REMEMBERED)  # by digest; an empty one is none

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest, which says what is wrong and where."""
        digest = hashlib.sha256(grammar.text.encode()).digest()
        fault = self._faults.get(digest)
        if fault is None:
            async with self._places:
                fault = await asyncio.to_thread(self._fault, grammar.text)
            self._faults[digest] = fault
        if fault:
            raise InvalidRequest(f"{grammar.param}: {fault}", param=grammar.param)

    def _fault(self, text: str) -> str:
        matcher = LLMatcher(self._tokens, text, log_level=0)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return short(matcher.get_error())
        return "" if first.strip(b"\0") else "there is no answer of this form"
