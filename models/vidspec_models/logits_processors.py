"""The changes to logits that a request may ask for: penalties, a bias, excluded tokens, a minimum length.

They are applied in the order of `make_logits_processors`, exclusions last: so no bias or penalty can undo them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from vidspec_models.request import GenerationRequest, SamplingParams
from vidspec_models.sampling import LogitsProcessor

# Below every logit, yet finite: if a grammar allows only tokens that are excluded here, the grammar wins.
_EXCLUDED = -1e30


def make_logits_processors(
    request: GenerationRequest, prompt_ids: Sequence[int], end_ids: frozenset[int]
) -> list[LogitsProcessor]:
    """The processors that the request needs, mostly none; `end_ids` end its answer. Ids without a logit are ignored."""
    params, found = request.sampling, list[LogitsProcessor]()
    if params.logit_bias:
        found.append(LogitBias(params.logit_bias))
    if params.has_penalties:
        found.append(Penalties(params, prompt_ids))
    if params.bad_word_ids:
        found.append(BadWords(params.bad_word_ids))
    if request.min_tokens > 0 and end_ids:
        found.append(MinTokens(request.min_tokens, end_ids))
    return found


class LogitBias:
    """Adds to the logits of some tokens, as OpenAI's API does."""

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self._bias = dict(bias)

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """See LogitsProcessor."""
        columns = _columns(self._bias, logits)
        logits[:, columns] += logits.new_tensor([self._bias[token] for token in columns])
        return logits


class Penalties:
    """Makes tokens that have already occurred less likely.

    Let x be a token's logit and c its count in the answer so far. If the token is in prompt or answer, x becomes x / r,
    or x r if x < 0 (repetition penalty r of CTRL, Keskar et al., arXiv 1909.05858, as in transformers). Then x becomes
    x - c frequency - (c > 0) presence (https://developers.openai.com/api/docs/guides/advanced-usage).
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._in_prompt = frozenset(prompt_ids) if params.repetition_penalty != 1.0 else frozenset[int]()
        self._prompt_columns: Tensor | None = None  # of `_in_prompt`: a prompt may have every token of a model
        self._counts: dict[int, int] = {}  # of the tokens in `_counted`
        self._counted: list[int] = []

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """See LogitsProcessor. Changes only the columns of tokens that have occurred."""
        self._count(prefix)
        proposed = _columns(islice(pending, len(logits) - 1), logits)
        columns = _columns(dict.fromkeys([*self._counts, *proposed]), logits)
        counts = torch.tensor([self._counts.get(token, 0) for token in columns], dtype=torch.float32)
        counts = counts.repeat(len(logits), 1)
        for row, token in enumerate(proposed, start=1):
            counts[row:, columns.index(token)] += 1
        counts = counts.to(logits.device)
        scores = logits[:, columns]
        if (repetition := self._params.repetition_penalty) != 1.0:
            in_prompt = [token in self._in_prompt for token in columns]
            has_been = (counts > 0) | torch.tensor(in_prompt, dtype=torch.bool, device=logits.device)
            scores = torch.where(has_been, _repeated(scores, repetition), scores)
            if self._prompt_columns is None:
                self._prompt_columns = logits.new_tensor(_columns(self._in_prompt, logits), dtype=torch.int64)
            logits[:, self._prompt_columns] = _repeated(logits[:, self._prompt_columns], repetition)
        scores = scores - self._params.frequency_penalty * counts - self._params.presence_penalty * (counts > 0)
        logits[:, columns] = scores
        return logits

    def _count(self, prefix: Sequence[int]) -> None:
        """Update the counts; start over if the answer was not only extended, as when a draft takes back guesses."""
        if self._counted != prefix[: len(self._counted)]:
            self._counts, self._counted = {}, []
        for token in prefix[len(self._counted) :]:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._counted.append(token)


class BadWords:
    """Excludes every token that would complete one of the bad words in the answer, as in vLLM."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._anywhere: list[int] = []  # words of one token
        self._after: dict[int, list[list[int]]] = {}  # longer words, by their second-to-last token
        for word in words:
            if len(word) == 1:
                self._anywhere += word
            else:
                self._after.setdefault(word[-2], []).append(list(word))
        self._most = max((len(word) for words in self._after.values() for word in words), default=1) - 1

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """See LogitsProcessor."""
        logits[:, _columns(self._anywhere, logits)] = _EXCLUDED
        before = [*prefix[max(len(prefix) - self._most, 0) :], *pending]
        for row in range(len(logits)):
            end = min(len(prefix), self._most) + row
            words = self._after.get(before[end - 1], ()) if end else ()
            completed = [word[-1] for word in words if before[max(end - len(word) + 1, 0) : end] == word[:-1]]
            logits[row, _columns(completed, logits)] = _EXCLUDED
        return logits


class MinTokens:
    """Excludes the end ids until the answer has `min_tokens` tokens."""

    def __init__(self, min_tokens: int, end_ids: Iterable[int]) -> None:
        self._min_tokens = min_tokens
        self._end_ids = sorted(end_ids)

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """See LogitsProcessor."""
        num_early = max(self._min_tokens - len(prefix), 0)
        logits[:num_early, _columns(self._end_ids, logits)] = _EXCLUDED
        return logits


def _repeated(scores: Tensor, penalty: float) -> Tensor:
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _columns(tokens: Iterable[int], logits: Tensor) -> list[int]:
    return [token for token in tokens if 0 <= token < logits.shape[-1]]
