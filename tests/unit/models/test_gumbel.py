"""Sampling: the noise generator is the published one, and the distribution is transformers'."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.gumbel import GumbelNoise, filtered_log_probabilities, gumbel_noise, philox4x32
from vidspec_models.request import SamplingParams


def words(counter: int, key: int) -> list[int]:
    part = torch.tensor(counter)
    return [int(word) for word in philox4x32((part, part, part, part), (key, key)).tolist()]


def test_philox_gives_the_published_known_answers() -> None:
    """The vectors are Random123's kat_vectors for philox4x32-10."""
    assert words(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(0xFFFFFFFF, 0xFFFFFFFF) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    block = gumbel_noise(7, torch.arange(10), 50)
    assert torch.equal(gumbel_noise(7, torch.tensor([4]), 50)[0], block[4])
    assert torch.equal(gumbel_noise(7, torch.tensor([4]), 33)[0], block[4, :33])
    assert not torch.equal(gumbel_noise(8, torch.tensor([4]), 50)[0], block[4])
    assert not torch.equal(gumbel_noise(7 + 2**40, torch.tensor([4]), 50)[0], block[4])


@given(st.lists(st.tuples(st.integers(-3, 9), st.integers(1, 12)), min_size=1, max_size=12))
def test_noise_is_the_same_however_it_is_asked_for(steps: list[tuple[int, int]]) -> None:
    """The target asks for some positions, keeps the first of them, and asks again from there; a draft goes back."""
    kept, like, first = GumbelNoise(7, 8), torch.empty(50), 0
    for step, count in steps:
        first = max(first + step, 0)
        assert torch.equal(kept.rows(first, count, like), gumbel_noise(7, torch.arange(first, first + count), 50))


@pytest.mark.parametrize(("vocabulary", "expected"), [(100, [32]), (151_936, [1] * 7)])
def test_of_a_large_vocabulary_no_more_noise_is_made_than_is_needed(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, expected: list[int]
) -> None:
    made: list[int] = []

    def noting(_: int, positions: torch.Tensor, width: int) -> torch.Tensor:
        made.append(len(positions))
        return torch.zeros(len(positions), width)

    monkeypatch.setattr("vidspec_models.gumbel.gumbel_noise", noting)
    noise, like = GumbelNoise(7, 32), torch.empty(vocabulary)
    for first, count in ((0, 4), (2, 3), (2, 1), (30, 2)):
        assert noise.rows(first, count, like).shape == (count, vocabulary)
    assert made == expected


def test_noise_has_the_mean_and_variance_of_a_standard_gumbel() -> None:
    noise = gumbel_noise(3, torch.arange(400), 500).double()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_top_k_top_p_and_min_p_leave_what_transformers_leaves() -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(30, 64, generator=torch.Generator().manual_seed(4)) * 3
    ours = filtered_log_probabilities(logits, SamplingParams(temperature=0.7, top_k=10, top_p=0.8, min_p=0.2))
    theirs = TemperatureLogitsWarper(0.7)(None, logits)
    theirs = TopKLogitsWarper(10)(None, theirs)
    # transformers renormalises after top-k before it applies top-p; so do we.
    theirs = MinPLogitsWarper(0.2)(None, TopPLogitsWarper(0.8)(None, theirs))
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("law", [{}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.7, "min_p": 0.01}])
def test_no_score_depends_on_an_order_of_summation(law: dict[str, Any]) -> None:
    """On a GPU that order depends on the rows beside it: a verification would choose another token once in a while."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(3, 151_665, generator=generator) * 3
    places = torch.randperm(151_665, generator=generator)
    params = SamplingParams(temperature=0.7, **law)
    assert torch.equal(
        filtered_log_probabilities(logits[:, places], params), filtered_log_probabilities(logits, params)[:, places]
    )


@pytest.mark.parametrize("num_tokens", [10, 1000, 4096])
def test_top_p_keeps_exactly_as_many_of_equal_tokens_as_it_says(num_tokens: int) -> None:
    for kept in range(1, num_tokens, max(num_tokens // 100, 1)):
        params = SamplingParams(temperature=1.0, top_p=kept / num_tokens)
        assert filtered_log_probabilities(torch.zeros(1, num_tokens), params).isfinite().sum() == kept
