"""What a request may ask to be told about its tokens, added to the message that has them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from torch import Tensor

from vidspec_models.grammar import GrammarMask
from vidspec_service.engine.ipc.messages import Tokens
from vidspec_service.engine.types import RowLogprobs


def with_logprobs(tokens: Tokens, logits: Tensor, num_top: int) -> Tokens:
    """The message with the log probabilities of its ids, each by its row of logits [n, V], n >= len(ids).

    Natural logarithms of the model's own distribution: before temperature, penalties and everything else, as vLLM's
    `raw_logprobs`.
    """
    found = tuple(_row_logprobs(row, token, num_top) for row, token in zip(logits, tokens.ids, strict=False))
    return replace(tokens, logprobs=found)


def _row_logprobs(row: Tensor, token: int, num_top: int) -> RowLogprobs:
    """Computed from one row alone, as without proposals: the same numbers in every mode."""
    logprobs = row.float().log_softmax(-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    return logprobs[token].item(), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def with_forced(tokens: Tokens, grammar: GrammarMask, committed: Sequence[int]) -> Tokens:
    """The message with the indices of those of its ids that the grammar forced; its ids end `committed`.

    Depends on grammar and answer, not on what was proposed: the same in every mode.
    """
    first = at = len(committed) - len(tokens.ids)
    forced: list[int] = []
    while at < len(committed):
        certain = grammar.forced(committed[:at])
        num_forced = next(
            (place for place, (token, must) in enumerate(zip(committed[at:], certain, strict=False)) if token != must),
            min(len(certain), len(committed) - at),
        )
        forced += range(at - first, at - first + num_forced)
        at += max(num_forced, 1)
    return replace(tokens, forced=tuple(forced))
