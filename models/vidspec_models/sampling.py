"""Coupled sampling: logits to the one token that (distribution, seed, position) determine.

The token at output position t is `argmax(log p_t + g_t)`, p_t being the softmax after temperature, top-k, top-p
and min-p (in that order, as in transformers) and g_t Gumbel noise that depends only on (seed, t, token id).
By the Gumbel-max trick its law is exactly p_t; because the noise is shared, a draft whose logits agree proposes
the very token the target will choose. Temperature 0 is plain argmax; both terms of the sum are in `drawing`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from vidspec_models.drawing import LEAST_TEMPERATURE, NOISE_ROWS, Noise, restricted_log_probabilities
from vidspec_models.request import SamplingParams

if TYPE_CHECKING:
    from vidspec_models.grammar import GrammarMask

_ROUNDING = 1e-3  # beyond that no order of the same sums changes which is the largest
_FROM_CHECKPOINT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MOST_MARGIN = 30.0  # so that the confidence stays below 1: only what a grammar says is certain


class LogitsProcessor(Protocol):
    """What changes one request's logits before its temperature: penalties, a bias, a grammar.

    A pure function of the request, its prompt and the answer's tokens, whatever it remembers between calls: a draft's
    `prefix` may be any other at the next one, and a row must not depend on the rows beside it.
    """

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """Row i of float32 logits [n, V], n <= 1 + len(pending), follows the answer's tokens `prefix + pending[:i]`.

        Returns the changed logits; `logits` are the processor's to write into. Both sequences are read at once.
        """
        ...


class CoupledSampler:
    """Chooses one request's tokens."""

    def __init__(
        self,
        params: SamplingParams,
        processors: Sequence[LogitsProcessor] = (),
        noise_rows: int = NOISE_ROWS,
        constraint: GrammarMask | None = None,
    ) -> None:
        """`processors` change the logits, in their order; then the constraint excludes what it does."""
        self._params = params
        self._processors = tuple(processors)
        self._constraint = constraint
        self._noise = None if params.temperature == 0.0 else Noise(params.seed, noise_rows)

    def choose(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int] = ()) -> list[int]:
        """Tokens for consecutive output positions; row i of logits [n, V] follows the tokens `prefix + pending[:i]`."""
        return [int(token) for token in self.tokens(logits, prefix, pending).tolist()]

    def tokens(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int] = ()) -> Tensor:
        """The same as int64 [n] on the device, not waited for."""
        if self._constraint is None or not self._takes_all or logits.device.type != "cpu":
            return self.scores(logits, prefix, pending).argmax(-1)
        # What a model chooses freely is mostly allowed, and then it is what it chooses of all that is allowed.
        scores = self._free_scores(logits, prefix, pending)
        chosen = scores.argmax(-1)
        if self._constraint.num_allowed(chosen.tolist(), prefix, pending) == len(chosen):
            return chosen
        return self._constrained(scores, prefix, pending).argmax(-1)

    def scores(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int] = ()) -> Tensor:
        """[n, V]: what the chosen tokens are the largest of."""
        if self._takes_all:  # excluding changes but a constant of the others' log-probabilities
            return self._constrained(self._free_scores(logits, prefix, pending), prefix, pending)
        return self._drawn(self._constrained(self._processed(logits, prefix, pending), prefix, pending), len(prefix))

    def _free_scores(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """`scores` without the constraint."""
        return self._drawn(self._processed(logits, prefix, pending), len(prefix))

    def _constrained(self, scores: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        if self._constraint is None:
            return scores
        return self._constraint(scores.to(torch.float32, copy=True), prefix, pending)

    def _processed(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        if self._processors:
            logits = logits.to(torch.float32, copy=True)
            for process in self._processors:
                logits = process(logits, prefix, pending)
        return logits

    def _drawn(self, logits: Tensor, position: int) -> Tensor:
        """Log-probabilities and noise, from an output position on; the logits themselves of the greedy."""
        if self._noise is None:
            return logits
        noise = self._noise.rows(position, len(logits), logits)
        return restricted_log_probabilities(logits, self._params) + noise

    @property
    def is_plain(self) -> bool:
        """All tokens are treated alike: scores are `sharpness` times the logits, and `noise`, but for a constant."""
        return self._constraint is None and self.is_free

    @property
    def is_free(self) -> bool:
        """The same as long as what is chosen so is allowed."""
        return not self._processors and self._takes_all

    def confirmed(self, tokens: Sequence[int], margins: Sequence[float], prefix: Sequence[int]) -> list[int]:
        """The first of these tokens, up to one that `choose` might not choose after `prefix` and those before it.

        Each has the largest of `sharpness` times its logit plus `noise`, and the next one is so far behind.
        """
        # Ties, and what is no number, are for `choose` in any case.
        least = 0.0 if self._noise is None else _ROUNDING * max(self.sharpness, 1.0)
        num_clear = next((at for at, margin in enumerate(margins) if not margin > least), len(tokens))
        return self.allowed(tokens[:num_clear], prefix)

    def allowed(self, tokens: Sequence[int], prefix: Sequence[int]) -> list[int]:
        """The first of these tokens, up to one that the constraint excludes after `prefix` and those before it."""
        if self._constraint is None or not tokens:
            return list(tokens)
        return list(tokens[: self._constraint.num_allowed(tokens, prefix, tokens[:-1])])

    @property
    def _takes_all(self) -> bool:
        params = self._params
        return (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)

    @property
    def sharpness(self) -> float:
        return 1.0 / max(self._params.temperature or 1.0, LEAST_TEMPERATURE)

    def noise(self, first_position: int, count: int, like: Tensor) -> Tensor:
        """float32 [count, V] as [V] `like` has it; zeros for the greedy."""
        if self._noise is None:
            return like.new_zeros(count, like.shape[-1], dtype=torch.float32)
        return self._noise.rows(first_position, count, like)


def choose_all(choices: Sequence[tuple[CoupledSampler, Tensor, Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """`choose` of many requests, each with its logits, prefix and pending tokens; the device is waited for once."""
    found = [sampler.tokens(logits, prefix, pending) for sampler, logits, prefix, pending in choices]
    together = [int(token) for token in (found[0] if len(found) == 1 else torch.cat(found)).tolist()]
    stops = list(itertools.accumulate(len(tokens) for tokens in found))
    return [together[stop - len(tokens) : stop] for stop, tokens in zip(stops, found, strict=True)]


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft's token and how sure it is: the probability that it, and not its runner-up, is the target's, too."""

    token: int
    confidence: float

    @classmethod
    def of(cls, token: int, margin: float) -> Guess:
        """`margin` is how far the runner-up's score is behind: a difference of log-probabilities, noise included."""
        return cls(token, 1.0 / (1.0 + math.exp(-min(margin, _MOST_MARGIN))))


def guess_all(choices: Sequence[tuple[CoupledSampler, Tensor, Sequence[int]]]) -> list[Guess]:
    """The next token of many requests, each with its logits [1, V] and the tokens before."""
    best = [sampler.scores(logits, prefix).topk(2) for sampler, logits, prefix in choices]
    tokens = torch.cat([found.indices[:, 0] for found in best]).tolist()
    margins = torch.cat([found.values[:, 0] - found.values[:, 1] for found in best]).tolist()
    return [Guess.of(int(token), margin) for token, margin in zip(tokens, margins, strict=True)]


def sampling_defaults(generation_config: Any) -> dict[str, float]:
    """How a checkpoint wants to be sampled where a request does not say: fields of `SamplingParams`, by name.

    As vLLM takes them from a transformers GenerationConfig, but for `do_sample`, which it does not read: false is
    greedy, as in transformers, and true without a temperature is temperature 1.
    """
    said = {name: getattr(generation_config, name, None) for name in _FROM_CHECKPOINT}
    found = {name: value for name, value in said.items() if value is not None}
    do_sample = getattr(generation_config, "do_sample", None)
    if do_sample is False:
        return {name: value for name, value in found.items() if name == "repetition_penalty"}
    return {"temperature": 1.0, **found} if do_sample else found
