"""Grammars: what an answer may look like, as a mask over a model's tokens.

A grammar is a string of llguidance's: Lark, or JSON that holds a schema. A mask depends on the grammar and on the
answer's tokens alone, so both models of a pair apply it to each row for what that row follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor

_MOST_KEPT = 64  # compiled grammars; a copy of one takes microseconds
_WORD = 32  # tokens of one number of a mask
_MOST_ERROR = 300  # characters of what llguidance says


class GrammarError(ValueError):
    """A grammar that cannot be followed: it is none, the model's tokens cannot write it, or it takes too much work."""


class GrammarMask:
    """Lets through what one request's grammar allows next: the end ids where an answer of it is complete, and nothing
    else where it cannot go on. It comes after other processors, and so has the last word.

    Where the grammar forces bytes, the only token allowed is the one that the tokenizer would write them with: "thing",
    not "t" and then "hing". To find such tokens takes llguidance ten times as long as to take one that was chosen, so
    they are asked for once, where what is forced begins.
    """

    def __init__(self, matcher: LLMatcher, stop_ids: frozenset[int], num_tokens: int) -> None:
        """The matcher, which stands at the beginning, masks `num_tokens` tokens, all that logits have."""
        self._matcher = matcher
        self._bits = np.empty((1, -(-num_tokens // _WORD)), np.int32)  # a row's tokens, one bit each
        self._stop_ids = stop_ids
        self._path: list[int] = []  # the last answer that was followed, a draft's guesses with it
        self._forced = [self._found_forced()]  # what must come after each beginning of it, one more than it has tokens
        self._place = 0  # tokens of it that the matcher stands after
        self._error = ""

    def prepare(self, prefix: Sequence[int], pending: Sequence[int]) -> None:
        """Follow these tokens, after which will be asked: while the model computes the logits, by another thread."""
        self._follow([*prefix, *pending])

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """See `LogitsProcessor`. Rows after a token that the grammar forbids, or after the end, are left as they are:
        nothing is chosen by them.
        """
        num_rows = self._num_rows(prefix, pending[: len(logits) - 1])
        if len(self._bits) < num_rows:
            self._bits = np.empty((num_rows, self._bits.shape[1]), np.int32)
        for row in range(num_rows):
            self._mask(len(prefix) + row, self._bits[row])
        self._error = self._error or self._said_error()
        if not (self._error or self._bits[0].any()):
            self._error = "no token of the model goes on as it says"
        if self._error:
            return logits
        excluded = np.invert(self._bits[:num_rows]).view(np.uint8)
        excluded = np.unpackbits(excluded, axis=1, count=logits.shape[-1], bitorder="little").view(np.bool_)
        if logits.device.type == "cpu":  # there a step may take less than a millisecond, and a call into torch counts
            np.copyto(logits.numpy()[:num_rows], -np.inf, where=excluded)
        else:
            logits[:num_rows].masked_fill_(torch.from_numpy(excluded).to(logits.device), float("-inf"))
        return logits

    def num_allowed(self, chosen: Sequence[int], prefix: Sequence[int], pending: Sequence[int]) -> int:
        """How many of `chosen` are let through, token i in row i, before the first that is not; may be fewer.

        In rows that do not matter, after a token that is forbidden or the end, everything is. Tells of a single token
        faster than a mask of all.
        """
        places = range(len(prefix), len(prefix) + self._num_rows(prefix, pending[: len(chosen) - 1]))
        if not places:
            return 0
        checked = enumerate(zip(places, chosen, strict=False))
        num_allowed = next((at for at, (place, token) in checked if not self._allows(place, token)), len(chosen))
        return 0 if self._said_error() else num_allowed

    def forced(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that the grammar leaves no choice about after `prefix`, written as the tokenizer would."""
        return list(self._forced[len(prefix)]) if self._follow(prefix) == len(prefix) else []

    def check(self) -> None:
        """Raises GrammarError if what it let through lately may not be of the grammar."""
        if self._error:
            raise GrammarError(f"the grammar cannot be followed any further: {self._error}")

    def _num_rows(self, prefix: Sequence[int], pending: Sequence[int]) -> int:
        """Rows that matter: the one after `prefix`, and one after each pending token up to one that is forbidden."""
        num_rows = self._follow([*prefix, *pending]) - len(prefix) + 1
        self._error = self._said_error() or ("" if num_rows > 0 else "it does not allow the answer so far")
        return 0 if self._error else num_rows

    def _said_error(self) -> str:
        """What llguidance says has gone wrong, as that no token of the model goes on as the grammar says."""
        return self._matcher.get_error()[:_MOST_ERROR]

    def _allows(self, place: int, token: int) -> bool:
        """Whether a token may come at this place of the path, or at its end."""
        if place < len(self._path) and self._path[place] == token:
            return True
        if forced := self._forced[place]:
            return token == forced[0]
        if token in self._stop_ids:
            self._mask(place, self._bits[0])
            return bool(self._bits[0, token // _WORD] >> token % _WORD & 1)
        self._stand(place)
        return self._matcher.validate_tokens([token]) == 1

    def _mask(self, place: int, bits: NDArray[np.int32]) -> None:
        """Fill in what may come at this place of the path."""
        if forced := self._forced[place]:
            bits[:] = 0
            bits.view(np.uint32)[forced[0] // _WORD] = 1 << forced[0] % _WORD
        else:
            self._stand(place)
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def _stand(self, place: int) -> None:
        """Have the matcher stand at this place of the path."""
        if place < self._place:
            self._matcher.rollback(self._place - place)
        elif place > self._place:
            self._matcher.try_consume_tokens(self._path[self._place : place])
        self._place = place

    def _follow(self, tokens: Sequence[int]) -> int:
        """Make these tokens the path, unless they are its beginning; returns how many of them are allowed."""
        num_known = len(self._path)
        if tokens[:num_known] != self._path:
            pairs = enumerate(zip(self._path, tokens, strict=False))
            num_known = next((at for at, (old, new) in pairs if old != new), min(num_known, len(tokens)))
        if num_known == len(tokens):
            return num_known
        self._stand(num_known)
        del self._path[num_known:], self._forced[num_known + 1 :]
        for token in tokens[num_known:]:
            forced = self._forced[-1]
            if token in self._stop_ids or (forced and token != forced[0]):
                break
            if self._matcher.try_consume_tokens([token]) == 0:
                break
            self._place += 1
            self._path.append(token)
            self._forced.append(forced[1:] or self._found_forced())
        return len(self._path)

    def _found_forced(self) -> list[int]:
        """What must come where the matcher stands."""
        if self._matcher.is_stopped():
            return list(self._stop_ids) if len(self._stop_ids) == 1 else []
        return self._matcher.compute_ff_tokens()


class Grammars:
    """Compiles grammars for one model; keeps those that were used lately. Not thread-safe."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int], num_tokens: int) -> None:
        """`tokenizer` is transformers' fast one. Takes 0.6 s for 150,000 tokens, in which no other thread runs."""
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=sorted(stop_ids) or None)
        self._stop_ids = stop_ids
        self._num_tokens = num_tokens
        self._compiled: LRUCache[str, LLMatcher] = LRUCache(_MOST_KEPT)

    def mask(self, grammar: str) -> GrammarMask:
        """For one request; raises GrammarError. Compiling leaves other threads running."""
        if grammar not in self._compiled:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error()[:_MOST_ERROR]}")
            self._compiled[grammar] = matcher
        return GrammarMask(self._compiled[grammar].deep_copy(), self._stop_ids, self._num_tokens)
