"""Stock transformers `generate` on one model: the reference that our ids must equal and the peer that benches time.

Modules, cache and loop are transformers' own, nothing is our engine's. Only conversations and video metadata are
prepared as for the engine, so that both see the same prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from vidspec_models.decoder.int8 import (
    fake_quantise,
    language_linears,
    round_layers_to_four_bits,
    vision_linears,
    widen,
)
from vidspec_models.decoder.placement import Precision, resolve_device, resolve_precision
from vidspec_models.errors import ModelLoadError
from vidspec_models.families.base import metadata
from vidspec_models.families.conversation import conversation
from vidspec_models.loading.checkpoint import load_config, load_processor, load_stock_model
from vidspec_models.loading.spec import ModelSpec, find_family, model_path, rounded_dtype
from vidspec_models.request import SamplingParams, Turn, Video
from vidspec_models.synthetic.model import random_language_model, random_prompt
from vidspec_models.synthetic.recipe import Recipe, find_recipe, prompt_index

GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class StockAnswer:
    """One generation; times are on the monotonic clock, one per token."""

    ids: tuple[int, ...]  # includes the end token
    prompt_tokens: int
    token_times: tuple[float, ...]


class Stopwatch:
    """A streamer for `generate`: when tokens came, and how many together; the prompt's, maybe none, come first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, ids: Tensor) -> None:
        self.times.append(time.monotonic())
        self.counts.append(ids.numel())

    def end(self) -> None:
        pass


class StockGenerator:
    """One model on one device, loaded by `from_pretrained` with the device and dtype that the engine would take."""

    def __init__(self, spec: ModelSpec) -> None:
        path = model_path(spec)
        self.device = resolve_device(spec.device, spec.role)
        precision = resolve_precision(spec.dtype, self.device, rounded_dtype=rounded_dtype(path))
        self.dtype = precision.dtype
        transformers.utils.logging.disable_progress_bar()
        try:
            self._processor = load_processor(path, spec.revision)
            config = load_config(path, spec.revision)
            model = load_stock_model(path, spec.revision, config, precision)
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            raise ModelLoadError(f"{spec.role} model {spec.path!r} cannot be loaded: {error}") from error
        self._model = model.to(self.device).eval()
        self._family = find_family(model.config.model_type)(self._model, self._processor)
        if precision.is_int8 and self.device.type == "cpu":
            widen(model)
            fake_quantise(vision_linears(model))
        round_weights(self._family.language_model, model.lm_head, precision)

    @torch.inference_mode()
    def answer(
        self,
        turns: Sequence[Turn],
        videos: Sequence[Video],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        min_tokens: int = 0,
    ) -> StockAnswer:
        """Generate once. Sampling uses transformers' own generator: the engine's distribution, but other tokens."""
        arguments = self._arguments(sampling) | {"max_new_tokens": max_tokens, "min_new_tokens": min_tokens}
        inputs, stopwatch = self._inputs(turns, videos), Stopwatch()
        out = self._model.generate(**inputs, **arguments, streamer=stopwatch)
        times = tuple(stopwatch.times[1:])
        prompt_tokens = inputs["attention_mask"].shape[1]
        return StockAnswer(ids=tuple(out[0, -len(times) :].tolist()), prompt_tokens=prompt_tokens, token_times=times)

    @torch.inference_mode()
    def prefill_s(self, embeddings: NDArray[np.float32]) -> float:
        """Seconds of the language model alone, from a prompt's embeddings [P, hidden size] to the logits after it."""
        rows = torch.from_numpy(embeddings)[None].to(self.device, self.dtype)
        began = time.monotonic()
        hidden = self._family.language_model(inputs_embeds=rows, use_cache=True).last_hidden_state
        self._model.lm_head(hidden[:, -1:])
        return time.monotonic() - began

    def _inputs(self, turns: Sequence[Turn], videos: Sequence[Video]) -> Any:
        messages = conversation(self._processor, turns)
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = self._processor(
            text=text,
            videos=[video.frames for video in videos] or None,
            video_metadata=[metadata(video) for video in videos] or None,
            do_sample_frames=False,
            return_tensors="pt",
            **(self._family.video_arguments() if videos else {}),
        )
        return inputs.to(self.device, self.dtype)  # casts the pixels only

    def _arguments(self, sampling: SamplingParams) -> dict[str, Any]:
        if sampling.temperature == 0.0:
            return {"do_sample": False}
        torch.manual_seed(sampling.seed)
        law = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return {"do_sample": True, **law}


def round_weights(language_model: Any, lm_head: Any, precision: Precision) -> None:
    """Give a stock language model the weights that the engine has with this precision."""
    if precision.is_int4:
        round_layers_to_four_bits(language_model)
    if precision.is_int8:
        if precision.dtype is not torch.float32:  # a tied embedding is not rounded on a GPU
            lm_head.weight = nn.Parameter(lm_head.weight.detach().clone(), requires_grad=False)
        fake_quantise(language_linears(language_model, lm_head), precision.dtype)


class RandomStock(StockGenerator):
    """Stock `generate` on a random model with the engine's weights and prompts; prompts are given as embeddings."""

    def __init__(self, recipe: Recipe, spec: ModelSpec) -> None:
        device = resolve_device(spec.device, spec.role)
        self._recipe = recipe
        precision = resolve_precision(spec.dtype, device)
        self._model = random_language_model(recipe.shape, recipe.seed, device, precision.dtype)
        round_weights(self._model.model, self._model.lm_head, precision)
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def _arguments(self, sampling: SamplingParams) -> dict[str, Any]:
        """Raises ValueError unless sampling is greedy."""
        if sampling.temperature > 0:
            raise ValueError("random models are compared greedily")
        return super()._arguments(sampling)

    def _inputs(self, turns: Sequence[Turn], videos: Sequence[Video]) -> Any:
        """Videos are ignored."""
        embedding = self._model.get_input_embeddings().weight
        index = prompt_index(turns[-1].text)
        prompt = random_prompt(self._recipe.pair_shape, self._recipe.shape, index, embedding)[1]
        mask = torch.ones(1, len(prompt), dtype=torch.long, device=prompt.device)
        return {"inputs_embeds": prompt[None], "attention_mask": mask}


def load_stock(spec: ModelSpec) -> StockGenerator:
    """The peer for a checkpoint or a recipe. Raises ModelLoadError."""
    recipe = find_recipe(model_path(spec))
    return StockGenerator(spec) if recipe is None else RandomStock(recipe, spec)
