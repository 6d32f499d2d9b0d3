"""The random models' family: a prompt is drawn by its number, whatever frames come with it; there is no tower."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vidspec_models.decoder import Decoder
from vidspec_models.families.encoding import cells
from vidspec_models.inputs import EncodedVideo, Prompt, Turn, Video
from vidspec_models.synthetic.recipe import Recipe, prompt_index
from vidspec_models.synthetic.weights import random_prompt


class RandomFamily:
    """One recipe's family; the `processor` that all families are handed is None."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def language_model(self, model: Any) -> Any:
        return model.model

    def default_num_frames(self, processor: Any) -> int:
        return self._recipe.pair_shape.num_frames

    def video_arguments(self, processor: Any) -> Mapping[str, Any]:
        return {}

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        return self._recipe.pair_shape.video_tokens

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        """Nothing of it: there is no tower, and a prompt's number says all."""
        return EncodedVideo(words="", features=torch.empty(0), grid=torch.empty(0, 3, dtype=torch.int64))

    def prepare(
        self, model: Any, processor: Any, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[EncodedVideo]
    ) -> Prompt:
        pair, index = self._recipe.pair_shape, prompt_index(turns[-1].text)
        ids, embeddings = random_prompt(pair, self._recipe.shape, index, decoder.embedding)
        decoder.require_room(len(ids))
        side = math.isqrt(pair.frame_tokens)
        is_video = torch.arange(len(ids), device=embeddings.device) < pair.video_tokens
        return Prompt(
            ids=tuple(ids.tolist()),
            embeddings=embeddings,
            rotary=decoder.prompt_rotary(len(ids)),
            is_video=is_video,
            next_position=len(ids),
            grid=cells(pair.num_frames, side, side).to(embeddings.device),
        )
