"""Stock `generate` on a random model: the same weights and the same prompts as the engine's, prompts as embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from vidspec_models.inputs import Turn, Video
from vidspec_models.loading import model_path, resolve_device, resolve_dtype
from vidspec_models.spec import ModelSpec
from vidspec_models.stock import StockAnswer, StockGenerator, Stopwatch
from vidspec_models.synthetic.recipe import Recipe, find_recipe, prompt_index
from vidspec_models.synthetic.weights import random_language_model, random_prompt
from vidspec_models.token_sampling import SamplingLaw


class RandomStock:
    """transformers' own class, cache, attention (sdpa) and loop."""

    def __init__(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> None:
        self._recipe = recipe
        self._model = random_language_model(recipe.shape, recipe.seed, device, dtype)
        self._model.generation_config = GenerationConfig(pad_token_id=0)

    @torch.inference_mode()
    def answer(self, turns: Sequence[Turn], videos: Sequence[Video], max_tokens: int, law: SamplingLaw) -> StockAnswer:
        """Generate once, greedily; raises ValueError for another law. Videos are not looked at."""
        if law.temperature > 0:
            raise ValueError("random models are compared greedily")
        embedding = self._model.get_input_embeddings().weight
        index = prompt_index(turns[-1].text)
        prompt = random_prompt(self._recipe.pair_shape, self._recipe.shape, index, embedding)[1]
        stopwatch = Stopwatch()
        out = self._model.generate(
            inputs_embeds=prompt[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=prompt.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            streamer=stopwatch,
        )
        ids = tuple(out[0].tolist())
        return StockAnswer(ids=ids, prompt_tokens=len(prompt), token_times=tuple(stopwatch.times[-len(ids) :]))


def load_stock(spec: ModelSpec) -> StockGenerator | RandomStock:
    """The peer for a checkpoint or a recipe. Raises ModelLoadError."""
    recipe = find_recipe(model_path(spec))
    if recipe is None:
        return StockGenerator(spec)
    device = resolve_device(spec.device, spec.role)
    return RandomStock(recipe, device, resolve_dtype(spec.dtype, device))
