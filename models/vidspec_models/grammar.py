"""GrammarCompiler: restrict the form of an answer, as a mask over a model's tokens.

A grammar is a string in llguidance's format: Lark, or JSON that holds a schema. A mask depends only on the grammar and
the answer's tokens before the row, so both models of a pair can apply it to each of their rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from cachetools import LRUCache
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor

_MAX_KEPT = 64  # compiled grammars; a copy of one takes microseconds
_WORD = 32  # tokens per int32 of a mask
_MAX_ERROR = 300  # characters of llguidance's message that are kept
_NO_TOKEN = "no token of the model matches what it requires next"
# Work grows with a step's items times the grammar's rules: with llguidance's own limit, a step may take minutes.
_MAX_ITEMS_IN_STEP = 10_000  # rules that read character by character need a third of it for 60,000 tokens
_USUAL_S = 0.005  # processor time of a step; common grammars take microseconds
_MAX_OVERTIME_S = 1.0  # how much longer all steps of an answer may take together: other answers wait meanwhile
_OVERTIME = "it takes too much time"

T = TypeVar("T")


class GrammarError(ValueError):
    """The grammar is invalid, the model's tokens cannot write it, or it takes too much work."""


class GrammarMask:
    """Allows only the tokens that one request's grammar permits next. The end ids are allowed where the answer may be
    complete, and nothing else where it cannot go on. Runs after all other processors, so its decision is final.

    Where the grammar forces bytes, the only token allowed is the one that the tokenizer would write for them: "thing",
    not "t" and then "hing". llguidance needs ten times as long to find forced tokens as to consume a token, so it is
    asked once, at the beginning of each forced stretch.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, stop_ids: frozenset[int], num_tokens: int) -> None:
        """`matcher` is at the beginning of the grammar and stays there; `num_tokens` is the number of logits."""
        self._beginning = (0, matcher)
        self._returned_to = self._beginning  # the last place gone back to, and a matcher that stays there
        self._matcher = matcher.deep_copy()
        self._tokenizer = tokenizer
        self._bits = np.empty((1, -(-num_tokens // _WORD)), np.int32)  # per row, one bit per token
        self._stop_ids = stop_ids
        self._path: list[int] = []  # the answer followed last, including a draft's guesses
        self._forced = [self._find_forced()]  # forced tokens after each prefix of `_path`: len(_path) + 1 entries
        self._place = 0  # number of tokens of `_path` that the matcher has consumed
        self._is_copied = False  # to go back: where a rule has `max_tokens` or `stop`, llguidance takes no token back
        self._error = ""
        self._overtime_s = 0.0

    def prepare(self, prefix: Sequence[int], pending: Sequence[int]) -> None:
        """Follow the tokens that the next call will ask about: by another thread, while the model computes logits."""
        self._follow([*prefix, *pending])

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """See `LogitsProcessor`. Rows after a token that the grammar forbids, or after the end, stay unchanged: no
        token is chosen from them.
        """
        num_rows = self._num_rows(prefix, pending[: len(logits) - 1])
        if len(self._bits) < num_rows:
            self._bits = np.empty((num_rows, self._bits.shape[1]), np.int32)
        for row in range(num_rows):
            self._mask(len(prefix) + row, self._bits[row])
        self._error = self._error or self._find_error()
        if not (self._error or self._bits[0].any()):
            self._error = _NO_TOKEN
        if self._error:
            return logits
        excluded = np.invert(self._bits[:num_rows]).view(np.uint8)
        excluded = np.unpackbits(excluded, axis=1, count=logits.shape[-1], bitorder="little").view(np.bool_)
        if logits.device.type == "cpu":  # a step may take less than a millisecond there: torch's call overhead matters
            np.copyto(logits.numpy()[:num_rows], -np.inf, where=excluded)
        else:
            logits[:num_rows].masked_fill_(torch.from_numpy(excluded).to(logits.device), float("-inf"))
        return logits

    def num_allowed(self, chosen: Sequence[int], prefix: Sequence[int], pending: Sequence[int]) -> int:
        """How many of `chosen`, token i for row i, come before the first one that is not allowed; may return fewer.

        Rows after a forbidden token or after the end do not matter: everything is allowed there. Checking single
        tokens is faster than computing masks.
        """
        places = range(len(prefix), len(prefix) + self._num_rows(prefix, pending[: len(chosen) - 1]))
        if not places:
            return 0
        checked = enumerate(zip(places, chosen, strict=False))
        num_allowed = next((at for at, (place, token) in checked if not self._allows(place, token)), len(chosen))
        return 0 if self._find_error() else num_allowed

    def forced(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that the grammar leaves no choice about after `prefix`, written as the tokenizer would."""
        return list(self._forced[len(prefix)]) if self._follow(prefix) == len(prefix) else []

    def check(self) -> None:
        """Raise GrammarError if an error occurred: tokens allowed since then may violate the grammar."""
        if self._error:
            raise GrammarError(f"the grammar cannot be followed any further: {self._error}")

    def _num_rows(self, prefix: Sequence[int], pending: Sequence[int]) -> int:
        """Rows that matter: the row after `prefix`, and one after each pending token before the first forbidden one."""
        num_rows = self._follow([*prefix, *pending]) - len(prefix) + 1
        self._error = self._find_error() or ("" if num_rows > 0 else "it does not allow the answer so far")
        return 0 if self._error else num_rows

    def _allows(self, place: int, token: int) -> bool:
        """Whether `token` is allowed after the first `place` tokens of the path."""
        if place < len(self._path) and self._path[place] == token:
            return True
        if forced := self._forced[place]:
            return token == forced[0]
        if token in self._stop_ids:
            self._mask(place, self._bits[0])
            return bool(self._bits[0, token // _WORD] >> token % _WORD & 1)
        self._move_to(place)
        return self._timed(self._matcher.validate_tokens, [token]) == 1

    def _mask(self, place: int, bits: NDArray[np.int32]) -> None:
        """Set the bits of the tokens allowed after the first `place` tokens of the path."""
        if forced := self._forced[place]:
            bits[:] = 0
            bits.view(np.uint32)[forced[0] // _WORD] = 1 << forced[0] % _WORD
        else:
            self._move_to(place)
            self._timed(self._matcher.unsafe_compute_mask_ptr, bits.ctypes.data, bits.nbytes)

    def _move_to(self, place: int) -> None:
        """Move the matcher to after the first `place` tokens of the path."""
        if place < self._place:
            self._go_back(place)
        elif self._is_copied:
            self._repeat(place)
        elif place > self._place:
            self._matcher.try_consume_tokens(self._path[self._place : place])
        self._place = place

    def _go_back(self, place: int) -> None:
        if not self._is_copied and self._matcher.rollback(self._place - place):
            return
        self._is_copied = True
        kept = self._returned_to if self._returned_to[0] <= place else self._beginning
        self._place, self._matcher = kept[0], kept[1].deep_copy()
        self._repeat(place)
        self._returned_to = (place, self._matcher.deep_copy())  # an answer grows: the next place is rarely before it

    def _repeat(self, place: int) -> None:
        """Consume tokens of the path as the first time: what `max_tokens` counts depends on the steps."""
        for token in self._path[self._place : place]:
            self._matcher.try_consume_tokens([token])
            self._matcher.compute_ff_tokens()

    def _follow(self, tokens: Sequence[int]) -> int:
        """Make `tokens` the path, unless the path begins with them; returns how many of them are allowed."""
        if self._overtime_s > _MAX_OVERTIME_S:
            return 0
        num_known = len(self._path)
        if tokens[:num_known] != self._path:
            pairs = enumerate(zip(self._path, tokens, strict=False))
            num_known = next((at for at, (old, new) in pairs if old != new), min(num_known, len(tokens)))
        if num_known == len(tokens):
            return num_known
        self._move_to(num_known)
        del self._path[num_known:], self._forced[num_known + 1 :]
        for token in tokens[num_known:]:
            forced = self._forced[-1]
            if token in self._stop_ids or (forced and token != forced[0]):
                break
            if self._timed(self._matcher.try_consume_tokens, [token]) == 0:
                break
            self._place += 1
            self._path.append(token)
            self._forced.append(forced[1:] or self._timed(self._find_forced))
        return len(self._path)

    def _timed(self, step: Callable[..., T], *args: Any) -> T:
        """What a step of llguidance returns; notes by how much it takes longer than usual."""
        began = time.thread_time()
        result = step(*args)
        self._overtime_s += max(0.0, time.thread_time() - began - _USUAL_S)
        return result

    def _find_error(self) -> str:
        """Why the grammar cannot be followed any further; empty if it can."""
        return _OVERTIME if self._overtime_s > _MAX_OVERTIME_S else _error_of(self._matcher)

    def _find_forced(self) -> list[int]:
        """The forced tokens at the matcher's current position."""
        if self._matcher.is_stopped():
            return list(self._stop_ids) if len(self._stop_ids) == 1 else []
        tokens = self._matcher.compute_ff_tokens()
        num_valid = self._matcher.validate_tokens(tokens) if tokens else 0
        if tokens and num_valid == 0:
            # The tokenizer writes something else, and llguidance's mask would allow nothing but that: a special token
            # that the text spells, or, as Qwen's, which writes NFC, another form of a character. Begin with one byte.
            tokens = self._tokenizer.tokenize_bytes(self._matcher.compute_ff_bytes()[:1])
            num_valid = self._matcher.validate_tokens(tokens)
        return tokens[:num_valid]


class GrammarCompiler:
    """Compiles grammars for one model; keeps the most recently used ones. Not thread-safe."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int], num_tokens: int) -> None:
        """`tokenizer` is a fast one of transformers. Takes 0.6 s for 150,000 tokens, and blocks all other threads."""
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=sorted(stop_ids) or None)
        self._stop_ids = stop_ids
        self._num_tokens = num_tokens
        self._compiled: LRUCache[str, LLMatcher] = LRUCache(_MAX_KEPT)

    def mask(self, grammar: str) -> GrammarMask:
        """A mask for one request; raises GrammarError. Other threads can run during compilation."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
        return GrammarMask(self._compiled[grammar], self._tokenizer, self._stop_ids, self._num_tokens)

    def _compile(self, grammar: str) -> LLMatcher:
        """Looks for a first token, too, which depends on the model's tokens: no answer begins that cannot go on."""
        limits = LLParserLimits(step_max_items=_MAX_ITEMS_IN_STEP)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {_error_of(matcher)}")
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_error_of(matcher)}")
        return matcher


def after_reasoning(grammar: str, end_id: int) -> str:
    """The grammar of any text up to the token `end_id`, and then of what `grammar` says.

    The empty line between both is written by the templates of models that think.
    """
    first, *named = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
    name = first.setdefault("name", "told_after_reasoning")  # a grammar may refer to itself by its own name
    thought = f'start: THOUGHT <[{end_id}]> "\\n\\n" @{name}\nTHOUGHT: /(.|\\n)*/'
    return json.dumps({"grammars": [{"lark_grammar": thought}, first, *named]})


def _error_of(matcher: LLMatcher) -> str:
    """llguidance's message if there is one, without the state of its parser that may follow."""
    message = matcher.get_error().partition("\n<state>")[0]
    return _NO_TOKEN if message.startswith("NoExtension") else message[:_MAX_ERROR]
