"""NgramDraft: proposes tokens from n-grams and the grammar, in the target's worker, where there is no draft model.

A proposal costs microseconds, so there is nothing to overlap: it is made when tokens are committed, and judged like
any other. A proposal that the plan does not verify is judged as well, against the next committed token, so the target
notices when a request's words begin to repeat.

It proposes what followed the same few tokens at their last occurrence: prompt lookup
(github.com/apoorvumang/prompt-lookup-decoding; `prompt_lookup_num_tokens` of transformers, `ngram` of vLLM), over the
prompt's words, the caller's earlier answers and the answer itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress, takewhile
from weakref import WeakKeyDictionary

from cachetools import LRUCache

from vidspec_service.engine.speculation.plan import MAX_ACCEPTANCE, MAX_DRAFT_TOKENS
from vidspec_service.engine.speculation.proposals import CERTAIN
from vidspec_service.engine.target.request import TargetRequest

NGRAM_TOKEN_S = 1e-5  # per proposed token
_CALLERS, _ANSWERS, _ANSWER_TOKENS = 256, 8, 1024  # that are kept; a caller never gets another caller's words
_LONGEST, _SHORTEST = 4, 2  # tokens that must be equal; longer matches predict better
_BREAK = -1  # between two texts


class NgramIndex:
    """Texts, and for each n-gram in them the position that followed it last."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        for text in texts:
            self._append(text)
            self._tokens.append(_BREAK)
        self._start = len(self._tokens)  # of the answer in _tokens

    def continuation(self, answer: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow the answer; also adds the answer's new tokens to the index."""
        self._append(answer[len(self._tokens) - self._start :])
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            found = self._followed_at.get(tuple(self._tokens[-length:]))
            if found is not None:
                return list(takewhile(lambda token: token != _BREAK, self._tokens[found : found + most]))
        return []

    def _append(self, text: Sequence[int]) -> None:
        for token in text:
            end = len(self._tokens)
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                gram = tuple(self._tokens[end - length :])
                if _BREAK in gram:
                    break
                self._followed_at[gram] = end
            self._tokens.append(token)


class NgramDraft:
    """Answers of each caller, oldest first, and an index for each request that decodes."""

    def __init__(self) -> None:
        self._answers: LRUCache[tuple[str, str | None], deque[tuple[int, ...]]] = LRUCache(_CALLERS)
        self._indices: WeakKeyDictionary[TargetRequest, NgramIndex] = WeakKeyDictionary()

    def propose(self, request: TargetRequest) -> None:
        """Unless proposals are pending, propose what may follow the committed tokens, if anything is known."""
        speculation = request.speculation
        if speculation.chain.pending:
            return
        ids = [] if request.grammar is None else request.grammar.forced(request.committed)[:MAX_DRAFT_TOKENS]
        confidence = CERTAIN if ids else min(speculation.acceptance, MAX_ACCEPTANCE)
        ids = ids or self._index(request).continuation(request.committed, MAX_DRAFT_TOKENS)
        if ids:
            start = request.num_committed  # also the epoch: it rises, as epochs must
            speculation.chain.extend(start, start, ids, [confidence] * len(ids), request.committed)

    def end(self, request: TargetRequest) -> None:
        """Keep a complete answer for its caller's next requests."""
        answers = self._answers.setdefault(request.asked.cache_scope, deque(maxlen=_ANSWERS))
        answers.append(tuple(request.committed[:_ANSWER_TOKENS]))

    def _index(self, request: TargetRequest) -> NgramIndex:
        index = self._indices.get(request)
        if index is None:
            is_text = (~request.prompt.is_video).tolist()
            words = tuple(compress(request.prompt.ids, is_text))
            index = NgramIndex([words, *self._answers.get(request.asked.cache_scope, ())])
            self._indices[request] = index
        return index
