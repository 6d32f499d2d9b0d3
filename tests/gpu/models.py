"""Random bfloat16 decoders on the GPU: the released widths with few layers, so that a test takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vidspec_models.backends.cuda.step import CudaStep
from vidspec_models.backends.select import make_cuda_step
from vidspec_models.decoder.build import LayersAre, build_decoder
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.prompt import Prompt
from vidspec_models.synthetic.model import RandomFamily, random_language_model
from vidspec_models.synthetic.recipe import SHAPES as PAIRS
from vidspec_models.synthetic.recipe import ModelShape, Recipe
from vidspec_models.video_lm import VideoLM

PROMPT = 700  # rows: several attention tiles
_LAYERS = 3
_LLAVA, _QWEN = PAIRS["llava-onevision-7b+0.5b"], PAIRS["qwen2.5-vl-7b+3b"]
SHAPES = {
    "7b": replace(_LLAVA.target, num_layers=_LAYERS),
    "0.5b": replace(_LLAVA.draft, num_layers=_LAYERS),
    "3b": replace(_QWEN.draft, num_layers=_LAYERS),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """One decoder and the three ways to run its step."""

    decoder: Decoder
    captured: CudaStep
    launched: CudaStep
    plain: Callable[[Sequence[int], Sequence[int], list[Segment]], Tensor]
    model: VideoLM

    @torch.inference_mode()
    def prefilled(self, seed: int, num_rows: int) -> KVCache:
        """A cache with a random prompt in it, prefilled in two chunks."""
        generator = torch.Generator("cuda").manual_seed(seed)
        embedding = self.decoder.embedding
        shape = (num_rows, embedding.shape[1])
        embeddings = torch.empty(shape, dtype=embedding.dtype, device="cuda").normal_(0, 0.02, generator=generator)
        prompt = Prompt(
            ids=(0,) * num_rows,
            embeddings=embeddings,
            rotary=self.decoder.prompt_rotary(num_rows),
            is_video=torch.zeros(num_rows, dtype=torch.bool, device="cuda"),
            next_position=num_rows,
        )
        cache = KVCache(self.decoder.geometry, num_rows + 128)
        while cache.length < num_rows:
            self.model.prefill(prompt, cache, 512)
        return cache


def load(shape: ModelShape, layers_are: LayersAre = "moved") -> Loaded:
    """Build, fuse and capture; if a step cannot be captured, the tests that use it fail."""
    model = random_language_model(shape, 0, torch.device("cuda"), torch.bfloat16)
    with torch.inference_mode():
        decoder = build_decoder(model.model, model.lm_head, 8192, layers_are=layers_are)
    model.model.layers = nn.ModuleList()
    captured = make_cuda_step(decoder)
    assert isinstance(captured, CudaStep), captured
    launched = CudaStep(decoder, is_captured=False)
    family = RandomFamily(model, Recipe(pair="tiny", role="target"))
    video_lm = VideoLM(family, decoder, frozenset(), captured)
    return Loaded(decoder, captured, launched, decoder.step, video_lm)


def segments(caches: Sequence[KVCache], counts: Sequence[int]) -> list[Segment]:
    """`counts` rows at the end of each cache."""
    return [Segment(cache, cache.length, count) for cache, count in zip(caches, counts, strict=True)]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait for the device inside the block is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
