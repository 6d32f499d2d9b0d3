"""Child process of one configuration: times a target alone with one kind of compression.

Each configuration has a process of its own because a process's peak memory never falls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from vidspec_models.compression.dycoke import KVPruner
from vidspec_models.compression.token_selector import TokenSelector, token_selector
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.loading.load_model import load_model, tokenizer_file
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.prompt import Prompt
from vidspec_models.reference.measure import greedy_tokens
from vidspec_models.request import Compression, Video
from vidspec_models.video_lm import VideoHandling
from vidspec_service.bench.common.environment import Placement
from vidspec_service.bench.common.report import Row
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, about_video, scene_video
from vidspec_service.bench.compression.options import CompressionConfig, Method
from vidspec_service.engine.config import DyCoke

_PREFILL_ROWS = 512
_ANSWER_TOKENS = 8
_ENCODED_BYTES = 2**30  # of one clip
_WARM_UP_TOKENS = 20  # enough to include a refresh of the hidden rows
_RESET_PEAK_RSS = "5"  # see proc_pid_clear_refs(5)


class CompressedTarget:
    """The compressed target. Answers about one clip at a time, greedily, one row per forward."""

    def __init__(self, spec: ModelSpec, threads: int, config: CompressionConfig, max_tokens: int) -> None:
        torch.set_num_threads(threads)
        self._model = load_model(spec)
        self._tokenizer = Tokenizer.from_file(tokenizer_file(spec))
        self._choice = choice_of(config)
        self._dycoke = config.dycoke
        self._max_tokens = max_tokens
        prompt = self._prepared(scene_video(0, 5), CAPTION_PROMPT)
        self._answer(prompt, self._cache(prompt.num_tokens + _WARM_UP_TOKENS), _WARM_UP_TOKENS)
        # Loading holds the weights twice for a moment, a peak that would hide the peak of captioning.
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK_RSS, encoding="ascii")

    def placement(self) -> Placement:
        return Placement.of(self._model)

    def can_merge_frames(self) -> bool:
        return self._model.family.can_merge_frames

    def describe(self, seed: int, frames: int) -> Row:
        """Caption a test scene at `frames` frames, timed. Bytes are of keys and values at the last token."""
        video = scene_video(seed, frames)
        began = time.perf_counter()
        prompt = self._prepared(video, CAPTION_PROMPT)
        prepared = time.perf_counter()
        cache = self._cache(prompt.num_tokens + self._max_tokens)
        ids, first = self._answer(prompt, cache, self._max_tokens)
        ended = time.perf_counter()
        return {
            "text": self._tokenizer.decode(ids),
            "prompt_tokens": prompt.num_tokens,
            "video_tokens": prompt.num_video_tokens,
            "num_tokens": len(ids),
            "prepare_s": prepared - began,  # template, vision tower, compression, embedding
            "prefill_s": first - prepared,
            "decode_s": ended - first,  # of all tokens but the first
            "stored_bytes": cache.length * self._model.decoder.geometry.bytes_per_token(),
            "attended_bytes": self._attended_bytes(cache),
            "peak_bytes": self._peak_bytes(),  # of the process or device so far
        }

    def question(self, seed: int, frames: int, texts: Sequence[str]) -> list[str]:
        """The answers to questions about a test scene; the rows up to its video's end are prefilled once."""
        video, known = scene_video(seed, frames, key="asked"), EncoderCache(_ENCODED_BYTES)
        prompt = self._prepared(video, CAPTION_PROMPT, known)
        num_common = int(prompt.is_video.nonzero()[-1]) + 1
        seen, answers = self._cache(num_common), []
        while seen.length < num_common:
            self._model.prefill(prompt, seen, min(_PREFILL_ROWS, num_common - seen.length))
        for text in texts:
            about = self._prepared(video, text, known)
            cache = self._cache(about.num_tokens + _ANSWER_TOKENS)
            cache.copy_rows(seen, num_common)
            ids, _ = self._answer(about, cache, _ANSWER_TOKENS)
            answers.append(self._tokenizer.decode(ids))
        return answers

    def _cache(self, num_tokens: int) -> KVCache:
        return KVCache(self._model.decoder.geometry, num_tokens)

    def _prepared(self, video: Video, text: str, known: EncoderCache | None = None) -> Prompt:
        return self._model.prepare(about_video(text), (video,), known, handling=VideoHandling(selector=self._choice))

    def _answer(self, prompt: Prompt, cache: KVCache, most: int) -> tuple[list[int], float]:
        """At most `most` token ids (the cache must have room for them), and the time of the first one."""
        while (logits := self._model.prefill(prompt, cache, _PREFILL_ROWS)) is None:
            pass
        num_layers = self._model.decoder.geometry.num_layers
        pruner = None if self._dycoke is None else KVPruner.of(prompt, self._dycoke, num_layers)
        tokens = greedy_tokens(self._model, prompt, cache, logits, most, pruner)
        ids, first = [next(tokens)], time.perf_counter()
        return [*ids, *tokens], first

    def _attended_bytes(self, cache: KVCache) -> int:
        """Bytes of keys and values that the attention of the last row read."""
        geometry = self._model.decoder.geometry
        per_layer = geometry.bytes_per_token() // geometry.num_layers
        hidden = cache.hidden
        left_out = 0 if hidden is None else hidden.count * (geometry.num_layers - hidden.first_layer)
        return per_layer * (geometry.num_layers * cache.length - left_out)

    def _peak_bytes(self) -> int:
        devices = {span.device for span in self._model.decoder.geometry.spans}
        on_cuda = [torch.cuda.max_memory_allocated(device) for device in devices if device.type == "cuda"]
        return sum(on_cuda) if on_cuda else peak_rss_bytes()


def choice_of(config: CompressionConfig) -> TokenSelector | None:
    """Which tokens of each video to keep; None to keep all."""
    method, ratio = config.method, config.ratio
    if method is Method.RANDOM:
        return TokenSelector(method=method.value, ratio=ratio, select=partial(random_tokens, ratio=ratio))
    if method is Method.UNIFORM:
        return TokenSelector(method=method.value, ratio=ratio, select=partial(every_nth_token, ratio=ratio))
    served = Compression.DYCOKE if method is Method.TTM else Compression(method)
    return token_selector(served, ratio, config.dycoke or DyCoke())


def random_tokens(features: torch.Tensor, ratio: float) -> torch.Tensor:
    """A random share of a video's tokens, bool [F, M]: the baseline that every method has to beat."""
    count = math.prod(features.shape[:2])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return (order < max(1, round(ratio * count))).view(features.shape[:2])


def every_nth_token(features: torch.Tensor, ratio: float) -> torch.Tensor:
    """An evenly spaced share of a video's tokens, bool [F, M]; the positions shift from frame to frame."""
    places = torch.arange(math.prod(features.shape[:2]) + 1, dtype=torch.float64)
    return (places * ratio).floor().diff().bool().view(features.shape[:2])


def peak_rss_bytes() -> int:
    """Since the peak was reset; `getrusage` would count loading, and the parent that this was forked from."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
