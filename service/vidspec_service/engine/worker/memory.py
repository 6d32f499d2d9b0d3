"""Measures how much memory of its devices a loaded worker needs: weights at rest, and the most that work adds.

Work is a prefill chunk or a step, which take turns, and at the same time a vision tower and the prompts it makes. A
tower sees a video in groups of frames, so it is measured with one group of the largest frames. Its features are kept
until the prompt is built: twice while parts are joined, and once more where some are selected. Prompts are kept while
their requests run, with a row for every token; two more than run may be in preparation.

On a CPU, where the largest frames may take minutes, neither tower nor chunk is computed: they count as the slack.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import psutil
import torch

from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.errors import ModelLoadError
from vidspec_models.gumbel import NOISE_ROWS
from vidspec_models.prompt import Prompt
from vidspec_models.request import Video
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.cgroups import free_memory
from vidspec_service.engine.config import EngineConfig, prefill_rows
from vidspec_service.engine.kv_budget import CPU_KV_CACHE_TOKENS, DeviceMemory, WorkerMemory
from vidspec_service.engine.worker.input_processor import MAX_PREPARING

_PROBE_SIDE = 1024  # pixels of the measured video's frames: a server's default limit
_PROBE_FRAMES = 32  # no family's tower takes more at once
_SMALL_SIDE, _SMALL_FRAMES = 64, 2  # where only the form of features is wanted
_FEATURES_HELD = 3  # copies of a whole context's features
_CHOICE_BYTES = 4 * 2048 * 8  # per number of a row: selection works in float64, on 2048 rows at a time
_STEP_ROWS = 16
_SLACK = 256 * 2**20  # logits of a step, workspaces of libraries, holes between blocks


def measure_memory(model: VideoLM, config: EngineConfig) -> WorkerMemory:
    """Raises ModelLoadError if a CUDA device has no room for the work itself."""
    is_on_cpu = model.decoder.geometry.device.type == "cpu"
    room = config.kv_cache_tokens or (CPU_KV_CACHE_TOKENS if is_on_cpu else model.context_length)
    context = min(model.context_length, config.max_context or model.context_length, room)
    devices = (_on_cpu if is_on_cpu else _on_cuda)(model, config, context)
    return WorkerMemory(context=context, measured_at=time.monotonic(), devices=devices)


def _on_cpu(model: VideoLM, config: EngineConfig, context: int) -> tuple[DeviceMemory, ...]:
    encoded = model.encode(_video(_SMALL_FRAMES, _SMALL_SIDE))
    cache_bytes, row_bytes = model.decoder.geometry.bytes_per_token(), _row_bytes(model, encoded)
    work = _choice_bytes(model) + cache_bytes * context // 2 + _SLACK
    held = psutil.Process().memory_full_info()
    free, total = free_memory()
    mine = DeviceMemory(
        device="cpu",
        total=total,
        free=free,
        # Without what it shares with the process that it was forked from, if the kernel tells.
        weights=getattr(held, "uss", held.rss),
        activations=work + _noise_bytes(model, config) + _input_bytes(model, config, encoded, context),
        # The compiled kernels read keys in an order of their own, from a second copy of a running request's.
        token_bytes=row_bytes + (cache_bytes * 3 // 2 if model.has_kernels else cache_bytes),
    )
    return (mine,)


def _on_cuda(model: VideoLM, config: EngineConfig, context: int) -> tuple[DeviceMemory, ...]:
    geometry = model.decoder.geometry
    num_rows = prefill_rows(config, "cuda", 1)
    devices = list(dict.fromkeys(span.device for span in geometry.spans))
    try:
        _settle(devices)
        weights = {device: torch.cuda.memory_allocated(device) for device in devices}
        encoded, tower = _tower(model, devices)
        chunk = _peaks(devices, lambda: _compute(model, num_rows))
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(devices[0])
        raise ModelLoadError(
            f"the model is loaded, but there is no memory left to compute a chunk of {num_rows} tokens: "
            f"{free / 2**30:.2f} GiB free of {total / 2**30:.2f} on {devices[0]}; free it, or choose a lower "
            "--prefill-chunk, a smaller model, or a device for each (--draft-device)"
        ) from error
    _settle(devices)
    memories = []
    for device in devices:
        free, total = torch.cuda.mem_get_info(device)
        is_first = device == geometry.device
        cache_bytes = geometry.bytes_per_token_on(device)
        row_bytes = _row_bytes(model, encoded) if is_first else 0
        activations = tower[device] + chunk[device] + cache_bytes * context // 2 + _SLACK  # a cache that is copied
        if device == geometry.spans[-1].device:  # where logits are, and the noise that every sampled request keeps
            activations += _noise_bytes(model, config)
        if is_first:
            activations += _input_bytes(model, config, encoded, context)
        memories.append(
            DeviceMemory(
                device=str(device),
                total=total,
                free=free,
                weights=weights[device],
                activations=activations,
                token_bytes=cache_bytes + row_bytes,
            )
        )
    return tuple(memories)


def _settle(devices: list[torch.device]) -> None:
    """Wait for work in progress, and free the memory that the allocator keeps."""
    for device in devices:
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _peaks(devices: list[torch.device], work: Callable[[], object]) -> dict[torch.device, int]:
    """The most bytes that `work` takes of each device, in addition to those held before."""
    before = {device: torch.cuda.memory_allocated(device) for device in devices}
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    work()
    for device in devices:
        torch.cuda.synchronize(device)
    return {device: torch.cuda.max_memory_allocated(device) - before[device] for device in devices}


def _tower(model: VideoLM, devices: list[torch.device]) -> tuple[EncodedVideo, dict[torch.device, int]]:
    """A short video's features, and the bytes that tower and selection take for a video of any length."""
    encoded: list[EncodedVideo] = []
    peaks = _peaks(devices, lambda: encoded.append(model.encode(_video(_PROBE_FRAMES, _PROBE_SIDE))))
    first = model.decoder.geometry.device
    peaks[first] = max(peaks[first], _choice_bytes(model))
    return encoded[0], peaks


def _choice_bytes(model: VideoLM) -> int:
    return _CHOICE_BYTES * model.decoder.embedding.shape[1]


def _noise_bytes(model: VideoLM, config: EngineConfig) -> int:
    return config.max_running_requests * NOISE_ROWS * len(model.decoder.embedding) * torch.float32.itemsize


def _input_bytes(model: VideoLM, config: EngineConfig, encoded: EncodedVideo, context: int) -> int:
    """Features of a video that fills the context, prompts in preparation, and the encoder cache."""
    embedding = model.decoder.embedding
    features = (1 + len(encoded.deepstack)) * embedding.shape[1] * embedding.dtype.itemsize  # of a row
    rows = _FEATURES_HELD * features + MAX_PREPARING * _row_bytes(model, encoded)
    return context * rows + config.max_cached_feature_bytes


def _video(num_frames: int, side: int) -> Video:
    return Video(
        frames=np.zeros((num_frames, side, side, 3), np.uint8),
        source_indices=tuple(range(num_frames)),
        source_fps=1.0,
        source_num_frames=num_frames,
        duration_s=float(num_frames),
    )


def _compute(model: VideoLM, chunk: int) -> None:
    """Two chunks of a prompt, of which the second attends to the first, and a step; includes their KV cache."""
    decoder = model.decoder
    num_rows = min(2 * chunk, model.context_length - _STEP_ROWS)
    prompt = Prompt(
        ids=(0,) * num_rows,
        embeddings=decoder.embedding[:1].expand(num_rows, -1).contiguous(),
        rotary=decoder.prompt_rotary(num_rows),
        is_video=torch.zeros(num_rows, dtype=torch.bool, device=decoder.embedding.device),
        next_position=num_rows,
    )
    cache = KVCache(decoder.geometry, num_rows + _STEP_ROWS)
    while cache.length < num_rows:
        model.prefill(prompt, cache, chunk)
    model.step([StepRows(cache=cache, ids=[0] * _STEP_ROWS, position=num_rows)])


def _row_bytes(model: VideoLM, encoded: EncodedVideo) -> int:
    """Bytes of a prompt's row: embedding, cos and sin, deepstack features, its cell, its video mark."""
    embedding, num_deepstack = model.decoder.embedding, len(encoded.deepstack)
    numbers = (1 + num_deepstack) * embedding.shape[1] + 2 * model.decoder.geometry.head_dim
    return numbers * embedding.dtype.itemsize + 3 * 8 + 1
