"""Coupled sampling: from logits to the one token that (distribution, seed, position) determine.

The token at output position t is `argmax(log p_t + g_t)`: p_t is the softmax after temperature, top-k, top-p
and min-p (in that order, as in transformers), g_t is Gumbel noise that depends only on (seed, t, token id).
By the Gumbel-max trick the token is distributed exactly as p_t. Since both models use the same noise, a draft with
the same logits proposes exactly the token that the target will choose. Temperature 0 is plain argmax. Both terms of
the sum are computed in `gumbel`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from vidspec_models.gumbel import MIN_TEMPERATURE, NOISE_ROWS, GumbelNoise, filtered_log_probabilities
from vidspec_models.request import SamplingParams

if TYPE_CHECKING:
    from vidspec_models.grammar import GrammarMask

_ROUNDING = 1e-3  # with a larger margin, no order of summation changes which score is the largest
_MAX_MARGIN = 30.0  # keeps the confidence below 1: only tokens forced by a grammar are certain


class LogitsProcessor(Protocol):
    """Changes one request's logits before temperature is applied: penalties, a bias, a grammar.

    Must be a pure function of the request, its prompt and the answer's tokens, even if it caches something between
    calls: a draft may call next with any other `prefix`, and a row must not depend on the other rows of the call.
    """

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        """Row i of float32 logits [n, V], n <= 1 + len(pending), follows the answer's tokens `prefix + pending[:i]`.

        Returns the changed logits; the processor may overwrite `logits`. It reads both sequences only during the call.
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
        """`processors` change the logits in the given order; then the constraint excludes tokens."""
        self._params = params
        self._processors = tuple(processors)
        self._constraint = constraint
        self._noise = None if params.temperature == 0.0 else GumbelNoise(params.seed, noise_rows)

    def sample(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int] = ()) -> list[int]:
        """Tokens for consecutive output positions; row i of logits [n, V] follows the tokens `prefix + pending[:i]`."""
        return [int(token) for token in self.sample_on_device(logits, prefix, pending).tolist()]

    def sample_on_device(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int] = ()) -> Tensor:
        """Like `sample`, as int64 [n] on the device, without waiting for the device."""
        if self._constraint is None or not self._keeps_all_tokens or logits.device.type != "cpu":
            return self.scores(logits, prefix, pending).argmax(-1)
        # The unconstrained choice is usually allowed, and then it is also the best of the allowed tokens: excluding
        # others only shifts their log-probabilities by a constant.
        scores = self._drawn(self._processed(logits, prefix, pending), len(prefix))
        chosen = scores.argmax(-1)
        if self._constraint.num_allowed(chosen.tolist(), prefix, pending) == len(chosen):
            return chosen
        return self._constrained(scores, prefix, pending).argmax(-1)

    def scores(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int] = ()) -> Tensor:
        """[n, V]: the scores whose largest value per row is the chosen token."""
        return self._drawn(self._constrained(self._processed(logits, prefix, pending), prefix, pending), len(prefix))

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
        """Log-probabilities plus noise, for rows from output position `position` on; the logits if greedy."""
        if self._noise is None:
            return logits
        noise = self._noise.rows(position, len(logits), logits)
        return filtered_log_probabilities(logits, self._params) + noise

    @property
    def is_constrained(self) -> bool:
        """Whether a constraint may reject a token."""
        return self._constraint is not None

    @property
    def can_run_ahead(self) -> bool:
        """Whether a kernel can choose the tokens, and only the constraint has to check them: up to a constant, scores
        are `inverse_temperature` times the logits plus `noise`, for all tokens.
        """
        return not self._processors and self._keeps_all_tokens

    def confirmed(self, tokens: Sequence[int], margins: Sequence[float], prefix: Sequence[int]) -> list[int]:
        """The first tokens of `tokens`, as far as `sample` is certain to sample the same ones after `prefix`.

        Each token has the largest of `inverse_temperature` times its logit plus `noise`; `margins` are the leads over
        the runners-up.
        """
        # Ties and NaN always go to `sample`.
        least = 0.0 if self._noise is None else _ROUNDING * max(self.inverse_temperature, 1.0)
        num_clear = next((at for at, margin in enumerate(margins) if not margin > least), len(tokens))
        return self.allowed(tokens[:num_clear], prefix)

    def allowed(self, tokens: Sequence[int], prefix: Sequence[int]) -> list[int]:
        """The tokens before the first one that the constraint excludes after `prefix` and the tokens before it."""
        if self._constraint is None or not tokens:
            return list(tokens)
        return list(tokens[: self._constraint.num_allowed(tokens, prefix, tokens[:-1])])

    @property
    def _keeps_all_tokens(self) -> bool:
        params = self._params
        return self._noise is None or (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)

    @property
    def inverse_temperature(self) -> float:
        return 1.0 / max(self._params.temperature or 1.0, MIN_TEMPERATURE)

    def noise(self, first_position: int, count: int, like: Tensor) -> Tensor:
        """float32 [count, V], with V and the device of `like` [V]; zeros if greedy."""
        if self._noise is None:
            return like.new_zeros(count, like.shape[-1], dtype=torch.float32)
        return self._noise.rows(first_position, count, like)


def sample_all(choices: Sequence[tuple[CoupledSampler, Tensor, Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """`sample` for many requests, given their logits, prefix and pending tokens; waits for the device only once."""
    found = [sampler.sample_on_device(logits, prefix, pending) for sampler, logits, prefix, pending in choices]
    together = [int(token) for token in (found[0] if len(found) == 1 else torch.cat(found)).tolist()]
    stops = list(itertools.accumulate(len(tokens) for tokens in found))
    return [together[stop - len(tokens) : stop] for stop, tokens in zip(stops, found, strict=True)]


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A draft token and its confidence: the probability that the target chooses it rather than its runner-up."""

    token: int
    confidence: float

    @classmethod
    def of(cls, token: int, margin: float) -> DraftToken:
        """`margin` is the lead over the runner-up's score: a difference of log-probabilities, noise included."""
        return cls(token, 1.0 / (1.0 + math.exp(-min(margin, _MAX_MARGIN))))


def propose_all(choices: Sequence[tuple[CoupledSampler, Tensor, Sequence[int]]]) -> list[DraftToken]:
    """The next draft token of many requests, given their logits [1, V] and the answer's tokens before it."""
    best = [sampler.scores(logits, prefix).topk(2) for sampler, logits, prefix in choices]
    tokens = torch.cat([found.indices[:, 0] for found in best]).tolist()
    margins = torch.cat([found.values[:, 0] - found.values[:, 1] for found in best]).tolist()
    return [DraftToken.of(int(token), margin) for token, margin in zip(tokens, margins, strict=True)]
