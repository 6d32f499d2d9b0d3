"""The bundled target gives the same tokens and cache rows in one call for several tokens as one by one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from tests.component.engine.harness import scene_video
from tests.component.engine.test_grammar import JSON
from vidspec_models.bundled import BUNDLED_TARGET
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import VIDEO, SamplingParams, Turn
from vidspec_models.sampling import CoupledSampler
from vidspec_models.video_lm import StepRows, VideoLM

pytestmark = pytest.mark.component

LENGTH, ROOM = 60, 80


@pytest.fixture(scope="module", params=["float32", "int8"])
def model(request: pytest.FixtureRequest) -> VideoLM:
    return load_model(ModelSpec(role="target", path=str(BUNDLED_TARGET), device="cpu", dtype=request.param))


class Sequence:
    """An unfinished answer about a clip."""

    def __init__(self, model: VideoLM, law: SamplingParams, grammar: str | None) -> None:
        self.model = model
        asked = "Describe the video." if grammar is None else "Describe the video as JSON."
        self.prompt = model.prepare([Turn(role="user", parts=(VIDEO, asked))], [scene_video(3, 2)])
        self.cache = KVCache(model.decoder.geometry, self.prompt.num_tokens + ROOM)
        self.sampler = CoupledSampler(law, constraint=None if grammar is None else model.grammar_mask(grammar))
        logits = None
        while logits is None:
            logits = model.prefill(self.prompt, self.cache, 512)
        self.ids = self.sampler.sample(logits[None], [])

    def rows(self) -> StepRows:
        position = self.prompt.next_position + len(self.ids) - 1
        return StepRows(cache=self.cache, ids=self.ids[-1:], position=position)

    def step(self) -> None:
        (logits,) = self.model.step([self.rows()])
        self.ids += self.sampler.sample(logits, self.ids)

    def is_done(self) -> bool:
        return len(self.ids) >= LENGTH or not self.model.stop_ids.isdisjoint(self.ids)


@pytest.mark.parametrize("grammar", [None, JSON], ids=["free", "json"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_tokens_and_rows_are_those_of_single_steps(model: VideoLM, temperature: float, grammar: str | None) -> None:
    law = SamplingParams(temperature=temperature, seed=5)
    alone, ahead = (Sequence(model, law, grammar) for _ in range(2))
    while not alone.is_done():
        alone.step()
    num_in_one_go = 0
    for count in [2, 5, 1, 7] * LENGTH:
        if ahead.is_done():
            break
        before = ahead.cache.length
        found = model.decode(ahead.rows(), ahead.sampler, ahead.ids, count)
        assert ahead.cache.length == before + len(found)
        ahead.ids += found
        num_in_one_go += len(found)
        if len(found) < count:  # too close to call, or not allowed
            ahead.step()
    assert ahead.ids[: len(alone.ids)] == alone.ids
    assert num_in_one_go > (len(alone.ids) // 2 if grammar is None else 5)  # the model prefers a caption
    length = alone.cache.length
    assert ahead.cache.length >= length
    assert torch.equal(ahead.cache.keys[..., :length, :], alone.cache.keys[..., :length, :])
    assert torch.equal(ahead.cache.values[..., :length, :], alone.cache.values[..., :length, :])


def test_what_asks_for_every_token_anew_is_left_to_single_steps(model: VideoLM) -> None:
    sequence = Sequence(model, SamplingParams(temperature=1.0, top_k=3), None)
    before = sequence.cache.length
    assert model.decode(sequence.rows(), sequence.sampler, sequence.ids, 4) == []
    assert sequence.cache.length == before


@pytest.mark.parametrize(("temperature", "seeds"), [(0.0, [5]), (1.5, range(5, 10))], ids=["greedy", "sampled"])
def test_a_draft_proposes_several_at_once_under_a_grammar_as_it_would_one_by_one(
    model: VideoLM, temperature: float, seeds: Iterable[int]
) -> None:
    most_found = 0
    for seed in seeds:  # which tokens the grammar forbids, and so how many are found, is chance
        law = SamplingParams(temperature=temperature, seed=seed)
        singly, ahead = (Sequence(model, law, JSON) for _ in range(2))
        while not singly.is_done():
            (found,) = model.propose([(singly.rows(), singly.sampler, singly.ids)], 1)
            singly.ids.append(found[0].token)
        while not ahead.is_done():
            (found,) = model.propose([(ahead.rows(), ahead.sampler, ahead.ids)], 3)
            ahead.ids += [each.token for each in found]
            most_found = max(most_found, len(found))
            assert ahead.cache.length == ahead.prompt.num_tokens + len(ahead.ids) - 1
        assert ahead.ids[: len(singly.ids)] == singly.ids
    assert most_found == 3
