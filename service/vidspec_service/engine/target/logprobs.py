"""Log probabilities of committed tokens and of their likeliest rivals, from the rows that were verified anyway."""

from __future__ import annotations

from msgspec.structs import replace
from torch import Tensor

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
