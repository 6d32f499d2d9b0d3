"""A model split over two or three devices against the same model on one: the same bits in every operation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.models.families.test_exactness import clip
from tests.unit.models.families.tiny_checkpoints import save
from vidspec_models.decoder.kv_cache import KVCache, KVPool
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.preservation.text_queries import TextQueries
from vidspec_models.prompt import Prompt
from vidspec_models.request import VIDEO, Turn
from vidspec_models.video_lm import StepRows, VideoLM

# Plain positions; M-RoPE; features added behind layers; a head that is the embedding.
FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl")
TURNS = ([Turn(role="user", parts=(VIDEO, "what?"))], [Turn(role="user", parts=(VIDEO, "a longer question"))])


@dataclass(frozen=True)
class World:
    """One checkpoint, with its three layers on one device and split."""

    whole: VideoLM
    split: VideoLM

    def prompts(self, index: int = 0) -> tuple[Prompt, Prompt]:
        video = clip(index, 4 + index)
        return self.whole.prepare(TURNS[index], [video]), self.split.prepare(TURNS[index], [video])


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    save(request.param, path)
    return path


def load(folder: Path, devices: str) -> VideoLM:
    return load_model(ModelSpec(role="target", path=str(folder), device=devices, dtype="float32"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> VideoLM:
    return load(folder, "cpu")


@pytest.fixture(scope="module", params=["cpu,cpu", "cpu,cpu,cpu"])
def world(request: pytest.FixtureRequest, folder: Path, whole: VideoLM) -> World:
    return World(whole, load(folder, request.param))


def prefilled(model: VideoLM, prompt: Prompt, chunk: int, room: int = 40) -> tuple[KVCache, Tensor]:
    cache, logits = KVCache(model.decoder.geometry, prompt.num_tokens + room), None
    while logits is None:
        logits = model.prefill(prompt, cache, chunk)
    return cache, logits


def rows(prompt: Prompt, cache: KVCache, ids: list[int]) -> StepRows:
    return StepRows(cache=cache, ids=ids, position=prompt.next_position + cache.length - prompt.num_tokens)


def stored(cache: KVCache) -> Tensor:
    """Keys and values of all layers, on whatever device, up to the cache's length."""
    return torch.stack((torch.cat(cache.keys_by_span), torch.cat(cache.values_by_span)))[..., : cache.length, :]


def test_each_place_has_its_own_weights_and_its_own_rows(world: World) -> None:
    geometry = world.split.decoder.geometry
    cache = KVCache(geometry, 10)
    for stored in (cache.keys_by_span, cache.values_by_span):
        assert [len(part) for part in stored] == [len(span.layers) for span in geometry.spans]
        assert sum(len(part) for part in stored) == 3
        assert len({part.data_ptr() for part in stored}) == len(geometry.spans) > 1
    assert geometry.device_names.split(",") == ["cpu"] * len(geometry.spans)
    with pytest.raises(ValueError, match="unpack"):
        _ = cache.keys  # the keys of one span must not pass for all keys


def test_prefill_in_chunks_steps_and_rollback_give_the_same_bits(world: World) -> None:
    pair = list(zip((world.whole, world.split), world.prompts(), strict=True))
    for chunk in (5, 4096):
        caches, logits = zip(*(prefilled(model, prompt, chunk) for model, prompt in pair), strict=True)
        assert torch.equal(*logits)
        assert torch.equal(*map(stored, caches))
        for ids, num_kept in (([7], 1), ([8, 9, 10, 11], 2), ([12, 13], 1), ([14] * 9, 9)):
            steps = [
                model.step([rows(prompt, cache, ids)])[0] for (model, prompt), cache in zip(pair, caches, strict=True)
            ]
            assert torch.equal(*steps)
            for cache in caches:
                cache.truncate(cache.length - len(ids) + num_kept)
        assert torch.equal(*map(stored, caches))


def test_a_ragged_batch_gives_the_same_bits(world: World) -> None:
    found = []
    for which, model in enumerate((world.whole, world.split)):
        batch = []
        for index, ids in ((0, [5]), (1, [6, 7, 8])):
            prompt = world.prompts(index)[which]
            batch.append(rows(prompt, prefilled(model, prompt, 16)[0], ids))
        found.append(torch.cat([*model.step(batch), *model.step(batch[::-1])]))
    assert torch.equal(*found)


def test_a_cache_that_grew_shrank_and_was_begun_with_anothers_rows_has_the_same_bits(world: World) -> None:
    found = []
    for model, prompt in zip((world.whole, world.split), world.prompts(), strict=True):
        pool = KVPool(model.decoder.geometry, 2048)
        first, _ = prefilled(model, prompt, 16)
        pool.num_used += first.capacity
        pool.shrink(first, 16)  # like a kept prefix
        cache = pool.new_cache()
        assert pool.grow(cache, 16)
        cache.copy_rows(first, 16)
        assert pool.grow(cache, prompt.num_tokens)
        logits = None
        while logits is None:
            logits = model.prefill(prompt, cache, 16)
        assert pool.grow(cache, prompt.num_tokens + 200)
        step = model.step([rows(prompt, cache, [3, 4])])[0]
        assert torch.equal(logits, prefilled(model, prompt, 16)[1])
        found.append(torch.cat((logits[None], step)))
        pool.release(cache)
        pool.release(first)
        assert pool.num_used == 0
    assert torch.equal(*found)


def test_what_the_text_looks_at_is_the_same(world: World) -> None:
    found = []
    for model, prompt in zip((world.whole, world.split), world.prompts(1), strict=True):
        geometry = model.decoder.geometry
        queries = TextQueries(prompt, geometry, model.decoder.scale)
        cache = KVCache(geometry, prompt.num_tokens)
        while cache.length < prompt.num_tokens:
            model.prefill(prompt, cache, 16, queries.observer(cache.length, 16))
        relevance = queries.relevance(cache, "video")
        assert relevance is not None
        found.append(relevance)
    assert torch.equal(*found)
    assert len(found[0].unique()) > 1
