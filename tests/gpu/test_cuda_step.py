"""The captured step on a GPU: the kernels' bits, the plain step's logits, ids for any row count, no device waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.models import PROMPT, SHAPES, Loaded, load, no_waiting, segments
from vidspec_models.request import SamplingParams
from vidspec_models.sampling import CoupledSampler
from vidspec_models.video_lm import StepRows

ANSWER = 48
WINDOWS = (1, 3, 8, 16)


@pytest.fixture(scope="module", params=[*SHAPES, "7b in int8"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    name, _, dtype = request.param.partition(" in ")
    return load(SHAPES[name], "rounded to int8" if dtype else "moved")


def _step(loaded: Loaded, counts: tuple[int, ...], *, how: str) -> Tensor:
    """Logits of one step with fresh caches of unequal lengths."""
    caches = [loaded.prefilled(index, PROMPT + 37 * index) for index in range(len(counts))]
    ids = [(7 * row + 1) % 500 for row in range(sum(counts))]
    positions = [cache.length + i for cache, count in zip(caches, counts, strict=True) for i in range(count)]
    with torch.inference_mode():
        logits: Tensor = getattr(loaded, how)(ids, positions, segments(caches, counts))
        return logits.clone()


@pytest.mark.parametrize("counts", [(1,), (9,), (17,), (1, 5, 9), (33, 33, 33), (1,) * 20])
def test_a_captured_step_has_the_bits_of_the_same_kernels_one_by_one(loaded: Loaded, counts: tuple[int, ...]) -> None:
    assert torch.equal(_step(loaded, counts, how="captured"), _step(loaded, counts, how="launched"))


@pytest.mark.parametrize("counts", [(1,), (17,), (1, 5, 9)])
def test_its_logits_are_those_of_the_plain_walk(loaded: Loaded, counts: tuple[int, ...]) -> None:
    ours, plain = (_step(loaded, counts, how=how).float() for how in ("captured", "plain"))
    error = (ours - plain).square().mean().sqrt() / plain.square().mean().sqrt()
    assert error < 0.05  # bfloat16 through all layers; a wrong head or mask gives about 1.4


def test_rows_scored_together_have_the_bits_they_have_alone(loaded: Loaded) -> None:
    assert loaded.captured.measure_invariance()
    assert loaded.decoder.batch_invariance.row_buckets


def test_a_step_never_waits_for_the_device(loaded: Loaded) -> None:
    cache = loaded.prefilled(0, PROMPT)
    loaded.captured([1], [cache.length], segments([cache], (1,)))
    torch.cuda.synchronize()
    with no_waiting():
        loaded.captured([1, 2], [cache.length, cache.length + 1], segments([cache], (2,)))


def test_ids_do_not_depend_on_how_many_rows_are_verified(loaded: Loaded) -> None:
    """A hundred prompts, each decoded alone and again with proposals that are right up to some token."""
    forks = []
    for index in range(100):
        alone, gaps = _decode(loaded, index, None)
        found, _ = _decode(loaded, index, alone)
        if found != alone:
            at = next(i for i, (one, other) in enumerate(zip(alone, found, strict=True)) if one != other)
            forks.append((index, at, gaps[at]))
    assert not forks, f"prompt, position, top-2 gap: {forks}"


def _decode(loaded: Loaded, index: int, told: list[int] | None) -> tuple[list[int], list[float]]:
    """Greedy ids and the gap between the two best logits at each; with `told`, verified in windows that end wrong."""
    cache, sampler = loaded.prefilled(index, PROMPT), CoupledSampler(SamplingParams())
    ids, gaps, turn = [index % 500], [0.0], 0
    while len(ids) <= ANSWER:
        window = WINDOWS[turn % len(WINDOWS)] if told else 0
        proposed = told[len(ids) : len(ids) + window] if told else []
        if len(proposed) > 1:
            proposed = [*proposed[:-1], (proposed[-1] + 1) % 500]
        position = cache.length
        (logits,) = loaded.model.step([StepRows(cache=cache, ids=[ids[-1], *proposed], position=position)])
        chosen = sampler.sample(logits, [])
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == chosen[accepted]:
            accepted += 1
        best = logits[: accepted + 1].float().topk(2, dim=-1).values
        ids += chosen[: accepted + 1]
        gaps += (best[:, 0] - best[:, 1]).tolist()
        cache.truncate(position + accepted + 1)
        turn += 1
    return ids[: ANSWER + 1], gaps[: ANSWER + 1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_chosen_on_the_device_are_those_of_the_host(loaded: Loaded, temperature: float) -> None:
    """Several tokens per call; where two logits are too close, the host chooses as usual."""
    sampler = CoupledSampler(SamplingParams(temperature=temperature, seed=3))
    in_one_go = 0
    for index in range(8):
        one, other = loaded.prefilled(index, PROMPT), loaded.prefilled(index, PROMPT)
        expected, ids = [index % 500], [index % 500]
        while len(expected) <= ANSWER:
            (logits,) = loaded.model.step([StepRows(cache=one, ids=expected[-1:], position=one.length)])
            expected += sampler.sample(logits, expected)
        while len(ids) <= ANSWER:
            rows = StepRows(cache=other, ids=ids[-1:], position=other.length)
            found = loaded.model.decode(rows, sampler, ids, 6)
            in_one_go += len(found)
            ids += found or sampler.sample(loaded.model.step([rows])[0], ids)
        assert ids[: len(expected)] == expected
    assert in_one_go > 4 * ANSWER


def test_a_cache_that_has_moved_is_found(loaded: Loaded) -> None:
    """A captured graph contains nothing of a request: a cache may grow and so change its address."""
    fixed, moving = loaded.prefilled(3, PROMPT), loaded.prefilled(3, PROMPT)
    moving.resize(moving.capacity + 4096)
    first, second = (loaded.captured([5], [cache.length], segments([cache], (1,))).clone() for cache in (fixed, moving))
    assert torch.equal(first, second)
