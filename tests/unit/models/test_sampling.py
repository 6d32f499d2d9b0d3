"""Coupled sampling: tokens follow the softmax, and both models share the noise."""

import pytest
import torch

from vidspec_models.request import SamplingParams
from vidspec_models.sampling import CoupledSampler, propose_all, sample_all


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
def test_sampled_tokens_follow_the_distribution(seed: int) -> None:
    """Pearson's chi-square over 20,000 positions; 11 degrees of freedom, 99.9 % quantile 31.3."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 1.5
    expected = torch.softmax(logits[0] / 0.8, dim=-1) * 20_000
    sampler = CoupledSampler(SamplingParams(temperature=0.8, seed=seed))
    counts = torch.bincount(torch.tensor(sampler.sample(logits.expand(20_000, 12), [])), minlength=12)
    assert ((counts - expected) ** 2 / expected).sum().item() < 31.3


def test_different_seeds_are_independent_draws() -> None:
    """The same position under 2,000 seeds; 11 degrees of freedom, 99.9 % quantile 31.3."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 1.5
    expected = torch.softmax(logits[0] / 0.8, dim=-1) * 2_000
    counts = torch.zeros(12)
    for seed in range(2_000):
        counts[CoupledSampler(SamplingParams(temperature=0.8, seed=seed), noise_rows=1).sample(logits, [0] * 3)[0]] += 1
    assert ((counts - expected) ** 2 / expected).sum().item() < 31.3


def test_tokens_at_successive_positions_are_independent_draws() -> None:
    """The joint counts of neighbouring positions against the product law; 15 degrees of freedom, 99.9 %: 37.7."""
    logits = torch.tensor([[0.0, 0.5, 1.0, -0.5]]).expand(20_000, 4)
    tokens = torch.tensor(CoupledSampler(SamplingParams(temperature=1.0, seed=11)).sample(logits, []))
    joint = torch.bincount(tokens[:-1:2] * 4 + tokens[1::2], minlength=16).double()
    law = torch.softmax(logits[0].double(), dim=-1)
    expected = torch.outer(law, law).flatten() * joint.sum()
    assert ((joint - expected) ** 2 / expected).sum().item() < 37.7


def test_a_token_does_not_depend_on_the_rows_scored_with_it() -> None:
    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(1))
    law = SamplingParams(temperature=1.0, top_p=0.9, top_k=30, seed=5)
    together = CoupledSampler(law).sample(logits, [])
    alone = [CoupledSampler(law).sample(logits[i : i + 1], [0] * i)[0] for i in range(40)]
    stepwise = CoupledSampler(law)
    assert together == alone == [stepwise.sample(logits[i : i + 1], [0] * i)[0] for i in range(40)]


def test_an_agreeing_draft_proposes_the_targets_token() -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(2))
    law = SamplingParams(temperature=1.0, seed=9)
    almost = logits + 1e-4 * torch.randn(200, 50, generator=torch.Generator().manual_seed(3))
    target, draft = CoupledSampler(law).sample(logits, []), CoupledSampler(law).sample(almost, [])
    assert sum(a == b for a, b in zip(target, draft, strict=True)) >= 198


TINY = [5e-324, 1e-310, 1e-46, 1e-40, 1e-38, 1e-30, 1e-9, 1e-6]


@pytest.mark.parametrize("temperature", [0.0, *TINY, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [*TINY, 0.5, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 5e-324, 1e-40, 1.0])
def test_at_the_edges_of_every_number_a_token_is_allowed_and_none_is_nan(
    temperature: float, top_p: float, min_p: float
) -> None:
    """A row with nothing allowed, or NaN, would choose token 0: an end, in many models, and an empty answer."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(6)) * 100
    logits[1:, ::2] = float("-inf")  # like logits masked by a grammar
    logits[2, 1:40] = float("-inf")
    sampler = CoupledSampler(SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, seed=1))
    scores = sampler.scores(logits, [])
    assert not scores.isnan().any()
    assert scores.isfinite().any(dim=-1).all()
    chosen = sampler.sample(logits, [])
    assert logits[range(6), chosen].isfinite().all()
    assert 0.0 < sampler.inverse_temperature < float("inf")
    if temperature < 1e-5 or top_p < 1e-5 or min_p == 1.0:
        assert chosen == logits.argmax(-1).tolist()


def test_many_requests_sample_together_what_each_samples_alone() -> None:
    generator = torch.Generator().manual_seed(11)
    laws = (SamplingParams(), SamplingParams(temperature=0.8, seed=1), SamplingParams(temperature=1.2, top_k=5, seed=2))
    logits = [torch.randn(rows, 60, generator=generator) for rows in (3, 1, 5)]
    alone = [CoupledSampler(law).sample(scores, [0] * 4) for law, scores in zip(laws, logits, strict=True)]
    together = sample_all(
        [(CoupledSampler(law), scores, [0] * 4, []) for law, scores in zip(laws, logits, strict=True)]
    )
    assert together == alone


@pytest.mark.parametrize("law", [SamplingParams(), SamplingParams(temperature=0.7, top_k=5, seed=1)])
def test_a_draft_token_is_the_chosen_token_and_is_sure_by_its_lead(law: SamplingParams) -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(3))
    proposed = propose_all([(CoupledSampler(law), row[None], [0] * at) for at, row in enumerate(logits)])
    assert [each.token for each in proposed] == CoupledSampler(law).sample(logits, [])
    best = CoupledSampler(law).scores(logits, []).topk(2).values
    assert [each.confidence for each in proposed] == pytest.approx(torch.sigmoid(best[:, 0] - best[:, 1]).tolist())


def test_the_only_token_that_is_left_is_certain() -> None:
    (proposed,) = propose_all([(CoupledSampler(SamplingParams(temperature=1.0, top_k=1)), torch.randn(1, 8), [])])
    assert proposed.confidence == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_a_plain_laws_scores_are_the_logits_sharpened_and_its_noise(temperature: float) -> None:
    """Up to a constant per row; a compiled draft chooses by these scores."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    sampler = CoupledSampler(SamplingParams(temperature=temperature, seed=9))
    assert sampler.can_run_ahead
    difference = sampler.scores(logits, [0] * 5) - (
        sampler.inverse_temperature * logits + sampler.noise(5, 3, logits[0])
    )
    assert torch.allclose(difference, difference[:, :1].expand_as(difference), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 2.0])
def test_tokens_are_confirmed_up_to_the_first_that_rounding_might_change(temperature: float) -> None:
    """`sample` decides ties within rounding; without noise nothing is rounded."""
    law = SamplingParams(temperature=temperature, seed=9)
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(4))
    sampler = CoupledSampler(law)
    for is_close in (False, True):
        if is_close:  # row 3: its best two scores, noise included, are almost equal
            scores = sampler.inverse_temperature * logits[3] + sampler.noise(3, 1, logits[0])[0]
            best, second = scores.topk(2).indices
            logits[3, second] += (scores[best] - scores[second]) / sampler.inverse_temperature - 1e-6
        scores = sampler.inverse_temperature * logits + sampler.noise(0, 6, logits[0])
        best_two = scores.topk(2)
        tokens = best_two.indices[:, 0].tolist()
        margins = (best_two.values[:, 0] - best_two.values[:, 1]).tolist()
        confirmed = sampler.confirmed(tokens, margins, [])
        assert confirmed == sampler.sample(logits, [])[: len(confirmed)]
        assert len(confirmed) == (3 if is_close and temperature else 6)


def test_a_greedy_request_can_run_ahead_of_what_the_checkpoint_says_about_drawing() -> None:
    """Checkpoints name top_k and top_p for every request; at temperature 0 they exclude nothing that could win."""
    sampler = CoupledSampler(SamplingParams(top_k=20, top_p=0.8, min_p=0.1))
    assert sampler.can_run_ahead
    assert sampler.sample(torch.tensor([[0.0, 2.0, 1.0]]), []) == [1]
    assert not CoupledSampler(SamplingParams(temperature=0.7, top_k=20)).can_run_ahead


def test_a_tie_and_what_is_no_number_are_not_confirmed() -> None:
    sampler = CoupledSampler(SamplingParams())
    assert sampler.confirmed([1, 2, 3], [0.5, 0.0, 0.5], []) == [1]
    assert sampler.confirmed([1, 2, 3], [0.5, 0.1, float("nan")], []) == [1, 2]


def test_the_colder_the_law_the_larger_is_the_lead_that_rounding_cannot_undo() -> None:
    def least(temperature: float) -> float:
        sampler = CoupledSampler(SamplingParams(temperature=temperature))
        return min(margin for margin in (2.0**-power for power in range(30)) if sampler.confirmed([1], [margin], []))

    assert least(0.1) > 4 * least(1.0)
    assert least(2.0) == least(1.0), "the noise is rounded, too"
