"""A row's facts are its own, however many rows were verified with it, and fit into a message."""

from __future__ import annotations

import pytest
import torch

from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Tokens
from vidspec_service.engine.target.request import with_logprobs


def tokens(*ids: int) -> Tokens:
    return Tokens(request_id="r", ids=ids, num_judged=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_log_softmax_of_each_committed_tokens_row(dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    told = with_logprobs(tokens(7, 9), logits, 3)
    assert (told.ids, told.num_judged) == ((7, 9), 3)
    expected = logits.float().log_softmax(-1)
    for row, (token, (own, top)) in enumerate(zip((7, 9), told.logprobs, strict=True)):
        best = expected[row].topk(3)
        assert own == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert [token for token, _ in top] == best.indices.tolist()
        assert [logprob for _, logprob in top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_rows_numbers_are_the_same_alone() -> None:
    logits = torch.randn(33, 3001, generator=torch.Generator().manual_seed(1))
    together = with_logprobs(tokens(*range(33)), logits, 20).logprobs
    alone = tuple(with_logprobs(tokens(i), logits[i : i + 1].clone(), 20).logprobs[0] for i in range(33))
    assert together == alone


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    ((_, top),) = with_logprobs(tokens(1), torch.randn(1, 5), 20).logprobs
    assert len(top) == 5


def test_the_most_that_a_forward_commits_with_the_most_alternatives_crosses_a_channel() -> None:
    here, there = Channel.pair()
    told = with_logprobs(tokens(*range(33)), torch.randn(33, 200_000), 20)
    here.send(told)
    received = there.receive()
    here.close()
    there.close()
    assert received is not None
    assert received[0] == told
