"""CompressedTarget: a target with one set of DyCoke's parameters, without engine or draft, timed and scored."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from vidspec_models.bundled import SCENE_DURATION_S, Scene, questions, render, sample_scene
from vidspec_models.compression.merging import merge_prompt
from vidspec_models.compression.pruner import KVPruner
from vidspec_models.inputs import Prompt, Turn, Video
from vidspec_models.kv_cache import KVCache
from vidspec_models.loading import load_model, tokenizer_file
from vidspec_models.token_sampling import CoupledSampler, SamplingLaw
from vidspec_models.video_lm import StepRows
from vidspec_service.bench.compression.messages import Describe, Described, Load, Loaded, Question
from vidspec_service.bench.compression.prefix import copied, text_behind_video, with_text
from vidspec_service.bench.compression.scoring import Score, score_answer, score_caption
from vidspec_service.bench.prompts import CAPTION_PROMPT

_PREFILL_ROWS = 512
_ANSWER_TOKENS = 8
_WARM_UP_TOKENS = 20  # beyond one refresh of the hidden rows
_SOURCE_FPS = 16.0
_RESET_PEAK_RSS = "5"  # see proc_pid_clear_refs(5)


class CompressedTarget:
    """One clip at a time, greedy, one row a forward: the compressed target's own text."""

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(load.threads)
        self._model = load_model(load.spec)
        self._tokenizer = Tokenizer.from_file(tokenizer_file(load.spec))
        self._dycoke = load.dycoke
        self._max_tokens = load.max_tokens
        self._sampler = CoupledSampler(SamplingLaw())
        prompt = self._merged(self._prepared(scene_clip(sample_scene(0), 5), CAPTION_PROMPT))
        self._answer(
            prompt, KVCache(self._model.decoder.geometry, prompt.num_tokens + _WARM_UP_TOKENS), _WARM_UP_TOKENS
        )
        forget_peak()

    def loaded(self) -> Loaded:
        geometry = self._model.decoder.geometry
        is_cuda = geometry.device.type == "cuda"
        return Loaded(
            device=geometry.device_names,
            device_name=torch.cuda.get_device_name(geometry.device) if is_cuda else "",
            dtype=str(geometry.dtype).removeprefix("torch."),
        )

    def describe(self, request: Describe) -> Described:
        """Caption a clip."""
        scene = sample_scene(request.seed)
        clip = scene_clip(scene, request.frames)
        began = time.perf_counter()
        whole = self._prepared(clip, CAPTION_PROMPT)
        prepared = time.perf_counter()
        prompt = self._merged(whole)
        cache = KVCache(self._model.decoder.geometry, prompt.num_tokens + self._max_tokens)
        ids, first = self._answer(prompt, cache, self._max_tokens)
        ended = time.perf_counter()
        score = score_caption(scene, self._tokenizer.decode(ids))
        return Described(
            score=score,
            is_all_right=score.right == score.asked,
            prompt_tokens=prompt.num_tokens,
            video_tokens=prompt.num_video_tokens,
            num_tokens=len(ids),
            prepare_s=prepared - began,
            prefill_s=first - prepared,
            decode_s=ended - first,
            stored_bytes=cache.length * self._model.decoder.geometry.bytes_per_token(),
            attended_bytes=self._attended_bytes(cache),
            peak_bytes=self._peak_bytes(),
        )

    def question(self, request: Question) -> Score:
        """Ask everything about a clip; its video is prefilled once."""
        scene = sample_scene(request.seed)
        prompt = self._merged(self._prepared(scene_clip(scene, request.frames), CAPTION_PROMPT))
        num_common = int(prompt.is_video.nonzero()[-1]) + 1
        decoder = self._model.decoder
        seen = KVCache(decoder.geometry, num_common)
        while seen.length < num_common:
            self._model.prefill(prompt, seen, min(_PREFILL_ROWS, num_common - seen.length))
        still = scene_clip(scene, 1)
        total = Score()
        for asked in questions(scene):
            about = with_text(prompt, text_behind_video(self._prepared(still, asked.text)), decoder)
            cache = copied(seen, decoder.geometry, about.num_tokens + _ANSWER_TOKENS)
            ids, _ = self._answer(about, cache, _ANSWER_TOKENS)
            total += score_answer(asked.answer, self._tokenizer.decode(ids))
        return total

    def _prepared(self, clip: Video, text: str) -> Prompt:
        return self._model.prepare([Turn(role="user", text=text, num_videos=1)], [clip])

    def _merged(self, prompt: Prompt) -> Prompt:
        return merge_prompt(prompt, self._dycoke.merge_ratio)

    def _answer(self, prompt: Prompt, cache: KVCache, most: int) -> tuple[list[int], float]:
        """At most so many token ids, for which the cache has room, and when the first one was there."""
        logits = None
        while logits is None:
            logits = self._model.prefill(prompt, cache, _PREFILL_ROWS)
        ids = self._sampler.choose(logits[None], 0)
        first = time.perf_counter()
        pruner = KVPruner.of(prompt, self._dycoke, self._model.decoder.geometry.num_layers)
        while ids[-1] not in self._model.stop_ids and len(ids) < most:
            position = prompt.next_position + len(ids) - 1
            rows = StepRows(cache=cache, ids=ids[-1:], position=position, pruner=pruner)
            ids += self._sampler.choose(self._model.step([rows])[0], len(ids))
        return ids, first

    def _attended_bytes(self, cache: KVCache) -> int:
        """What the last row's attention read."""
        geometry = self._model.decoder.geometry
        per_layer = geometry.bytes_per_token() // geometry.num_layers
        hidden = cache.hidden
        left_out = 0 if hidden is None else hidden.count * (geometry.num_layers - hidden.first_layer)
        return per_layer * (geometry.num_layers * cache.length - left_out)

    def _peak_bytes(self) -> int:
        devices = {span.device for span in self._model.decoder.geometry.spans}
        on_cuda = [torch.cuda.max_memory_allocated(device) for device in devices if device.type == "cuda"]
        return sum(on_cuda) if on_cuda else peak_rss_bytes()


def scene_clip(scene: Scene, num_frames: int) -> Video:
    """A scene's whole clip at so many frames, evenly spaced."""
    times = (np.arange(num_frames) + 0.5) / num_frames
    num_source = max(int(SCENE_DURATION_S * _SOURCE_FPS), num_frames)
    return Video(
        frames=render(scene, times),
        source_indices=tuple(int(time * num_source) for time in times),
        source_fps=num_source / SCENE_DURATION_S,
        source_num_frames=num_source,
        duration_s=SCENE_DURATION_S,
    )


def forget_peak() -> None:
    """Loading holds weights twice for a moment, which would hide the peak of the work."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK_RSS, encoding="ascii")


def peak_rss_bytes() -> int:
    """Since the peak was forgotten; `getrusage` would count loading, and the parent that this was forked from."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
