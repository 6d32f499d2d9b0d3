"""`python -m vidspec_models.reference.measure`: what a device does with real shapes, with torch and transformers alone.

Forward times of target and draft, their share of the memory's bandwidth, the target's tokens per second against stock
`generate`, peak memory; as JSON on stdout. `vidspec bench speed` measures the engine's modes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from vidspec_models.compression.dycoke import KVPruner
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.loading.load_model import library_versions, load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.prompt import Prompt
from vidspec_models.reference.stock import GREEDY, load_stock
from vidspec_models.request import Turn
from vidspec_models.sampling import CoupledSampler
from vidspec_models.synthetic.recipe import SHAPES, WEIGHT_BYTES, Recipe, prompt_text
from vidspec_models.video_lm import StepRows, VideoLM

_ROWS = {"target": (1, 2, 4, 9, 17), "draft": (1,)}
_WARM_UP, _CHUNK, _STRIDE = 5, 512, 4
_STRIDES_S = 1.0
_COPIES = 12
_COPIED_BYTES = {"cuda": 2**30, "cpu": 2**27}  # much larger than any cache
_ASKED = (Turn(role="user", parts=(prompt_text(0),)),)


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run all measurements, with one model on the device at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llava-onevision-7b+0.5b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="vidspec-random-") as folder:
        specs: dict[str, ModelSpec] = {}
        for role in _ROWS:
            path = Path(folder) / role
            Recipe(pair=args.shape, role=role).write(path)
            specs[role] = ModelSpec(path=str(path), role=role, device=args.device, dtype=args.dtype)
        stock = _stock(specs["target"], args.max_tokens)
        found = {role: _model(spec, args, role) for role, spec in specs.items()}
    ids, expected = found["target"].pop("ids"), stock.pop("ids")
    found["draft"].pop("ids")
    return {
        "shape": args.shape,
        "versions": library_versions(),
        "generate": stock,
        **found,
        "off_over_generate": found["target"]["tokens_per_s"] / stock["tokens_per_s"],
        "first_difference": next((i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b), None),
    }


def _stock(spec: ModelSpec, max_tokens: int) -> dict[str, Any]:
    generator = load_stock(spec)
    generator.answer(_ASKED, (), 8, GREEDY)
    answer = generator.answer(_ASKED, (), max_tokens, GREEDY)
    return {"tokens_per_s": _rate(answer.token_times), "ids": answer.ids}


def _model(spec: ModelSpec, args: argparse.Namespace, role: str) -> dict[str, Any]:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = load_model(spec)
    shape, geometry = Recipe(pair=args.shape, role=role).shape, model.decoder.geometry
    ids, token_times, cache = _answer(model, args.max_tokens)
    context = cache.length - max(_ROWS[role])
    steps = time_steps(model, cache, context, _ROWS[role], args.repeats)
    on_cuda = geometry.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(geometry.device) if on_cuda else None
    bandwidth = time_copies(geometry.device)
    weight_bytes = WEIGHT_BYTES[model.decoder.dtype_name]
    of_step = weight_bytes * shape.step_parameters()
    held = weight_bytes * shape.parameters() + cache.keys.nbytes + cache.values.nbytes
    return {
        "source": shape.source,
        "device": torch.cuda.get_device_name(geometry.device) if on_cuda else "cpu",
        "rows_are_invariant": model.decoder.batch_invariance.holds,
        "row_buckets": model.decoder.batch_invariance.row_buckets,
        "context": context,
        "step_s": steps,
        "bandwidth_bytes_per_s": bandwidth,
        "roofline_fraction": (of_step + context * geometry.bytes_per_token()) / bandwidth / steps[1],
        "over_weight_read_time": steps[1] * bandwidth / of_step,
        "tokens_per_s": _rate(token_times),
        "peak_over_weights_and_cache": peak / held if peak is not None else None,
        "ids": ids,
    }


def _answer(model: VideoLM, max_tokens: int) -> tuple[list[int], list[float], KVCache]:
    """Decode greedily, one row per step, as the engine does in mode `off`."""
    prompt = model.prepare(_ASKED, ())
    cache = KVCache(model.decoder.geometry, prompt.num_tokens + max_tokens)
    while (logits := model.prefill(prompt, cache, _CHUNK)) is None:
        pass
    ids, times = list[int](), list[float]()
    for token in greedy_tokens(model, prompt, cache, logits, max_tokens):
        ids.append(token)
        times.append(time.monotonic())
    return ids, times, cache


def greedy_tokens(
    model: VideoLM, prompt: Prompt, cache: KVCache, logits: Tensor, most: int, pruner: KVPruner | None = None
) -> Iterator[int]:
    """The greedy answer to a prefilled prompt with `logits` [V] after it, up to an end token; goes into the cache."""
    sampler, ids, scores = CoupledSampler(GREEDY), list[int](), logits[None]
    while True:
        ids += sampler.sample(scores, ids)
        yield ids[-1]
        if len(ids) == most or ids[-1] in model.stop_ids:
            return
        position = prompt.next_position + len(ids) - 1
        (scores,) = model.step([StepRows(cache=cache, ids=ids[-1:], position=position, pruner=pruner)])


def time_steps(model: VideoLM, cache: KVCache, context: int, rows: Sequence[int], repeats: int) -> dict[int, float]:
    """Median seconds of a step over n rows with `context` rows in the cache, including the choice of its tokens.

    The row counts take turns, so that a disturbance affects all of them.
    """
    sampler = CoupledSampler(GREEDY)
    times: dict[int, list[float]] = {num_rows: [] for num_rows in rows}
    for _ in range(_WARM_UP + repeats):
        for num_rows, measured in times.items():
            cache.length = context
            started = time.perf_counter()
            (logits,) = model.step([StepRows(cache=cache, ids=[0] * num_rows, position=context)])
            sampler.sample(logits, [])
            measured.append(time.perf_counter() - started)
    return {num_rows: statistics.median(measured[_WARM_UP:]) for num_rows, measured in times.items()}


def time_strides(model: VideoLM, cache: KVCache, context: int) -> float | None:
    """Median seconds per token when the model makes several tokens in one call; None if it cannot.

    Runs for _STRIDES_S: the model finds its best number of threads during strides, and tries a number that was slow at
    first again a quarter of a second later.
    """
    sampler, times = CoupledSampler(GREEDY), list[float]()
    began = now = time.perf_counter()
    while now < began + _STRIDES_S:
        started, cache.length = now, context
        if not model.decode(StepRows(cache=cache, ids=[0], position=context), sampler, [], _STRIDE):
            return None
        now = time.perf_counter()
        times.append((now - started) / _STRIDE)
    return statistics.median(times)


def time_copies(device: torch.device) -> float:
    """Bytes per second, read plus written, of the fastest of several large copies on a device."""
    num_bytes, times = _COPIED_BYTES[device.type], []
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    for _ in range(_COPIES):
        started = time.perf_counter()
        copy.copy_(source)
        if copy.is_cuda:
            torch.cuda.synchronize(copy.device)
        times.append(time.perf_counter() - started)
    return 2 * num_bytes / min(times[1:])


def _rate(token_times: Sequence[float]) -> float:
    return (len(token_times) - 1) / (token_times[-1] - token_times[0])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:]), indent=2) + "\n")
