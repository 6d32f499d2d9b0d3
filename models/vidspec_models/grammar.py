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
from torch import Tensor

_MOST_KEPT = 64  # compiled grammars; a copy of one takes microseconds
_WORD = 32  # tokens of one number of a mask
_MOST_ERROR = 300  # characters of what llguidance says


class GrammarError(ValueError):
    """A grammar that cannot be followed: it is none, the model's tokens cannot write it, or it takes too much work."""


class GrammarMask:
    """Lets through what one request's grammar allows next: the end ids where an answer of it is complete, and nothing
    else where it cannot go on. It comes after other processors, and so has the last word.
    """

    def __init__(self, matcher: LLMatcher, stop_ids: frozenset[int], num_tokens: int) -> None:
        """The matcher masks `num_tokens` tokens, all that logits have."""
        self._matcher = matcher
        self._bits = np.empty((1, -(-num_tokens // _WORD)), np.int32)  # a row's tokens, one bit each
        self._num_bytes = self._bits.nbytes  # of a row
        self._stop_ids = stop_ids
        self._consumed: list[int] = []  # the tokens that the matcher stands after
        self._found: tuple[list[int], list[int], int] = ([], [], 0)  # what `_bits` are of, and of how many rows
        self._error = ""

    def prepare(self, prefix: Sequence[int], pending: Sequence[int]) -> None:
        """Find what will be asked after these tokens: while the model computes the logits, by another thread."""
        self._find(prefix, pending)

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """See `LogitsProcessor`. Rows after a token that the grammar forbids, or after the end, are left as they are:
        nothing is chosen by them.
        """
        num_rows = self._find(prefix, pending[: len(logits) - 1])
        if num_rows == 0:
            return logits
        excluded = np.invert(self._bits[:num_rows]).view(np.uint8)
        excluded = np.unpackbits(excluded, axis=1, count=logits.shape[-1], bitorder="little").view(np.bool_)
        if logits.device.type == "cpu":  # there a step may take less than a millisecond, and a call into torch counts
            np.copyto(logits.numpy()[:num_rows], -np.inf, where=excluded)
        else:
            logits[:num_rows].masked_fill_(torch.from_numpy(excluded).to(logits.device), float("-inf"))
        return logits

    def num_allowed(self, chosen: Sequence[int], prefix: Sequence[int], pending: Sequence[int]) -> int:
        """See `Constraint`. It reads the masks themselves: llguidance's `validate_tokens` takes more than they let
        through, "t" and "hing" where only "thing" is written so.
        """
        num_rows = self._find(prefix, pending[: len(chosen) - 1])
        if num_rows == 0:
            return 0
        places = enumerate(zip(self._bits[:num_rows], chosen, strict=False))
        return next((at for at, (bits, token) in places if not bits[token // _WORD] >> token % _WORD & 1), len(chosen))

    def forced(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that the grammar leaves no choice about after `prefix`, written as the tokenizer would."""
        if not self._align(prefix):
            return []
        if self._matcher.is_stopped():
            return list(self._stop_ids) if len(self._stop_ids) == 1 else []
        return self._matcher.compute_ff_tokens()

    def check(self) -> None:
        """Raises GrammarError if what it let through lately may not be of the grammar."""
        if self._error:
            raise GrammarError(f"the grammar cannot be followed any further: {self._error}")

    def _find(self, prefix: Sequence[int], pending: Sequence[int]) -> int:
        """Put the masks of the rows that matter into `_bits`, unless they are there; returns how many these are."""
        known, after, num_known = self._found
        if num_known and known == prefix and after[: len(pending)] == pending:
            return min(num_known, 1 + len(pending))
        self._found = ([], [], 0)
        if len(self._bits) <= len(pending):
            self._bits = np.empty((1 + len(pending), self._bits.shape[1]), np.int32)
        address = self._bits.ctypes.data
        num_rows = 0
        if self._align(prefix):
            self._matcher.unsafe_compute_mask_ptr(address, self._num_bytes)
            num_rows = 1
            while num_rows <= len(pending) and self._consume(pending[num_rows - 1 : num_rows]):
                self._matcher.unsafe_compute_mask_ptr(address + num_rows * self._num_bytes, self._num_bytes)
                num_rows += 1
        self._error = self._matcher.get_error()[:_MOST_ERROR]
        if not (self._error or num_rows):
            self._error = "it does not allow the answer so far"
        elif not (self._error or self._bits[0].tobytes().strip(b"\0")):
            self._error = "no token of the model goes on as it says"
        if self._error:
            return 0
        self._found = (list(prefix), list(pending), num_rows)
        return num_rows

    def _align(self, prefix: Sequence[int]) -> bool:
        """Have the matcher stand after `prefix`; False if the grammar does not allow it, or the answer has ended."""
        consumed = self._consumed
        kept = len(consumed)
        if prefix[:kept] != consumed:  # of another kind of sequence it is what the next lines find out
            kept = next(
                (at for at, (old, new) in enumerate(zip(consumed, prefix, strict=False)) if old != new),
                min(kept, len(prefix)),
            )
            self._matcher.rollback(len(consumed) - kept)
            del consumed[kept:]
        return self._consume(prefix[kept:])

    def _consume(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if token in self._stop_ids or self._matcher.try_consume_tokens([token]) == 0:
                return False
            self._consumed.append(token)
        return True


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
