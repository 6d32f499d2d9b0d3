"""The device memory that a worker reports, with an allocator that counts as CUDA's does."""

from __future__ import annotations

from typing import Any, cast

import psutil
import pytest
import torch

from vidspec_models.decoder.kv_cache import CacheGeometry, LayerSpan
from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.errors import ModelLoadError
from vidspec_models.request import Video
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.kv_budget import CPU_KV_CACHE_TOKENS
from vidspec_service.engine.worker import memory
from vidspec_service.engine.worker.memory import measure_memory

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
CONFIG = EngineConfig(target=WorkerConfig(model="bundled"), prefill_chunk=64, max_cached_feature_bytes=1000)
WEIGHTS, TOWER, CHUNK, STEP = 50_000, 3_000, 700, 900
TOTAL, FREE = 10**9, 4 * 10**8
HIDDEN, HEAD_DIM = 16, 8


class Allocator:
    """Bytes held on each device, and their peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = {FIRST: WEIGHTS, SECOND: 2 * WEIGHTS}
        self.peak = dict(self.held)
        self.fails = False
        fakes = {
            "synchronize": lambda _: None,
            "empty_cache": lambda: None,
            "memory_allocated": self.held.__getitem__,
            "max_memory_allocated": self.peak.__getitem__,
            "reset_peak_memory_stats": lambda device: self.peak.update({device: self.held[device]}),
            "mem_get_info": lambda _: (FREE, TOTAL),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def takes(self, num_bytes: int) -> None:
        """Allocate and free `num_bytes` on every device."""
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        for device, held in self.held.items():
            self.peak[device] = max(self.peak[device], held + num_bytes)


class Model:
    """A VideoLM that allocates known amounts."""

    context_length = 1000
    default_num_frames = 4

    def __init__(self, allocator: Allocator, split: tuple[LayerSpan, ...] = ()) -> None:
        self._allocator = allocator
        geometry = CacheGeometry(
            num_layers=4, num_kv_heads=2, head_dim=HEAD_DIM, dtype=torch.bfloat16, device=FIRST, context_block=64,
            split=split,
        )  # fmt: skip
        self.decoder = type("Decoder", (), {"geometry": geometry})()
        self.decoder.embedding = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
        self.decoder.prompt_rotary = lambda n: (torch.zeros(n, 1, HEAD_DIM),) * 2
        self.chunks: list[int] = []

    def encode(self, video: Video) -> EncodedVideo:
        self._allocator.takes(TOWER)
        rows = torch.zeros(100, HIDDEN)
        return EncodedVideo(
            placeholder_text="", features=rows, shape=(4, 5, 5), grid=torch.empty(0, 3), deepstack=(rows, rows)
        )

    def prefill(self, prompt: Any, cache: Any, num_rows: int) -> None:
        self.chunks.append(cache.length)
        cache.length += num_rows
        self._allocator.takes(CHUNK)

    def step(self, batch: Any) -> None:
        self._allocator.takes(STEP)


class OnCpu(Model):
    """A VideoLM on a CPU, where only a small video is encoded."""

    num_pixels = 0

    def __init__(self, *, has_kernels: bool = False) -> None:
        geometry = CacheGeometry(
            num_layers=4, num_kv_heads=2, head_dim=HEAD_DIM, dtype=torch.bfloat16, device=torch.device("cpu"),
            context_block=64,
        )  # fmt: skip
        self.decoder = type("Decoder", (), {"geometry": geometry})()
        self.decoder.embedding = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
        self.has_kernels = has_kernels

    def encode(self, video: Video) -> EncodedVideo:
        self.num_pixels += video.frames[..., 0].size
        rows = torch.zeros(100, HIDDEN)
        return EncodedVideo(
            placeholder_text="", features=rows, shape=(4, 5, 5), grid=torch.empty(0, 3), deepstack=(rows, rows)
        )


class Cache:
    def __init__(self, *_: object) -> None:
        self.length = 0


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    monkeypatch.setattr(memory, "KVCache", Cache)
    return Allocator(monkeypatch)


def test_weights_tower_chunk_and_all_that_grows_with_the_context_are_counted(allocator: Allocator) -> None:
    model = Model(allocator)
    found = measure_memory(cast(VideoLM, model), CONFIG)
    (mine,) = found.devices
    cache_bytes = 2 * 4 * 2 * HEAD_DIM * 2
    row_bytes = (3 * HIDDEN + 2 * HEAD_DIM) * 2 + 25
    assert (found.context, mine.device, mine.total, mine.free) == (1000, "cuda:0", TOTAL, FREE)
    assert (mine.weights, mine.token_bytes) == (WEIGHTS, cache_bytes + row_bytes)
    features = 3 * 1000 * 3 * HIDDEN * 2  # held three times, each with two additional features
    grows = features + 500 * cache_bytes + 2 * 1000 * row_bytes
    choice = 4 * 2048 * 8 * HIDDEN  # more than TOWER
    noise = 16 * 32 * 2 * 4  # requests, rows that each keeps, tokens
    assert mine.activations == choice + grows + STEP + CONFIG.max_cached_feature_bytes + noise + memory._SLACK
    assert model.chunks == [0, 64]  # cache lengths before each chunk: the second attends to the first


@pytest.mark.parametrize("limit", [{"max_context": 400}, {"kv_cache_tokens": 400}])
def test_what_grows_with_the_context_ends_where_the_operators_does(allocator: Allocator, limit: dict[str, int]) -> None:
    whole = measure_memory(cast(VideoLM, Model(allocator)), CONFIG)
    config = EngineConfig(
        target=CONFIG.target, prefill_chunk=64, max_cached_feature_bytes=1000, **cast(dict[str, Any], limit)
    )
    found = measure_memory(cast(VideoLM, Model(allocator)), config)
    assert found.context == 400
    assert whole.devices[0].activations - found.devices[0].activations > 3 * 600 * 3 * HIDDEN * 2


def test_a_tower_that_takes_more_than_a_choice_counts_instead_of_it(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = measure_memory(cast(VideoLM, Model(allocator)), CONFIG)
    monkeypatch.setitem(globals(), "TOWER", 4 * 2048 * 8 * HIDDEN + 5)
    after = measure_memory(cast(VideoLM, Model(allocator)), CONFIG)
    assert after.devices[0].activations - before.devices[0].activations == 5


def test_each_device_of_a_split_model_counts_its_own_layers(allocator: Allocator) -> None:
    split = (LayerSpan(FIRST, range(1)), LayerSpan(SECOND, range(1, 4)))
    found = measure_memory(cast(VideoLM, Model(allocator, split)), CONFIG)
    first, second = found.devices
    layer = 2 * 2 * HEAD_DIM * 2
    assert (first.weights, second.weights) == (WEIGHTS, 2 * WEIGHTS)
    assert second.token_bytes == 3 * layer  # prompt rows are stored on the first layers' device
    assert first.token_bytes > layer
    noise = 16 * 32 * 2 * 4  # made where the logits are
    assert second.activations == TOWER + STEP + 500 * second.token_bytes + noise + memory._SLACK


def test_a_device_too_full_to_compute_says_what_to_change(allocator: Allocator) -> None:
    allocator.fails = True
    with pytest.raises(ModelLoadError, match=r"a chunk of 64 tokens: 0.37 GiB free of 0.93 on cuda:0"):
        measure_memory(cast(VideoLM, Model(allocator)), CONFIG)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_on_a_cpu_small_frames_tell_what_work_takes(monkeypatch: pytest.MonkeyPatch, *, has_kernels: bool) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: (FREE, TOTAL))
    model = OnCpu(has_kernels=has_kernels)
    found = measure_memory(cast(VideoLM, model), CONFIG)
    (mine,) = found.devices
    cache_bytes = 2 * 4 * 2 * HEAD_DIM * 2
    row_bytes = (3 * HIDDEN + 2 * HEAD_DIM) * 2 + 25
    assert (found.context, mine.device, mine.total, mine.free) == (1000, "cpu", TOTAL, FREE)
    assert mine.token_bytes == row_bytes + cache_bytes + (cache_bytes // 2 if has_kernels else 0)
    grows = 3 * 1000 * 3 * HIDDEN * 2 + 500 * cache_bytes + 2 * 1000 * row_bytes
    choice, noise = 4 * 2048 * 8 * HIDDEN, 16 * 32 * 2 * 4
    assert mine.activations == choice + noise + grows + CONFIG.max_cached_feature_bytes + memory._SLACK
    assert 0 < mine.weights < psutil.Process().memory_info().rss
    assert model.num_pixels < 10_000


def test_on_a_cpu_a_context_is_no_longer_than_the_usual_cache() -> None:
    model = OnCpu()
    model.context_length = 10**6
    assert measure_memory(cast(VideoLM, model), CONFIG).context == CPU_KV_CACHE_TOKENS
