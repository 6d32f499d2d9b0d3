"""What is told of committed tokens besides their ids, for requests that ask: log probabilities, what was forced."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from torch import Tensor

from vidspec_models.grammar import GrammarMask
from vidspec_service.engine.ipc.messages import Tokens
from vidspec_service.engine.types import RowLogprobs


def with_logprobs(tokens: Tokens, logits: Tensor, num_top: int) -> Tokens:
    """The message with the log probabilities of its ids, each by its row of logits [n, V], n >= len(ids).

    Natural logarithms of the model's own distribution: before temperature, penalties and whatever else, as vLLM's
    `raw_logprobs`.
    """
    found = tuple(_row_logprobs(row, token, num_top) for row, token in zip(logits, tokens.ids, strict=False))
    return replace(tokens, logprobs=found)


def _row_logprobs(row: Tensor, token: int, num_top: int) -> RowLogprobs:
    """Of a row alone, as it is where nothing was proposed: the same numbers in every mode."""
    logprobs = row.float().log_softmax(-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    return logprobs[token].item(), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def with_forced(tokens: Tokens, grammar: GrammarMask, committed: Sequence[int]) -> Tokens:
    """The message with the places of its ids, which end `committed`, that follow from the grammar alone.

    A function of grammar and answer, whatever was proposed: the same in every mode.
    """
    first = at = len(committed) - len(tokens.ids)
    forced: list[int] = []
    while at < len(committed):
        certain = grammar.forced(committed[:at])
        num_forced = next(
            (place for place, (said, must) in enumerate(zip(committed[at:], certain, strict=False)) if said != must),
            min(len(certain), len(committed) - at),
        )
        forced += range(at - first, at - first + num_forced)
        at += max(num_forced, 1)
    return replace(tokens, forced=tuple(forced))
