"""Random models that the engine can run: their weights, their prompts, and a draft whose oracle says what to propose.

A prompt is generated from its number, whatever frames come with it; there is no vision tower.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from vidspec_models.decoder.decoder import Decoder, QueryObserver
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.families.base import Family, cell_grid
from vidspec_models.prompt import Prompt
from vidspec_models.request import ChatTemplate, Turn, Video
from vidspec_models.sampling import CoupledSampler
from vidspec_models.synthetic.recipe import ModelShape, Oracle, PairShape, Recipe, prompt_index
from vidspec_models.video_lm import StepRows, VideoLM

if TYPE_CHECKING:
    from vidspec_models.backends.cpu.step import CpuStep
    from vidspec_models.backends.cuda.step import CudaStep

_SPREAD = 0.02  # standard deviation of embeddings and weights, as transformers initialises them


def random_language_model(shape: ModelShape, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' own class, created directly on the device and in the dtype. Changes torch's global seed.

    Rows of the head beyond the tokens are zero, so that they are never chosen, as in a trained model.
    """
    config = Qwen2Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context_length,
        tie_word_embeddings=shape.is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=_SPREAD,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    model.lm_head.weight.data[shape.num_tokens :].zero_()
    return model.eval().requires_grad_(False)


def random_prompt(pair: PairShape, shape: ModelShape, index: int, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """Prompt `index`: token ids [P] on CPU, and embeddings [P, hidden size] like `embedding`, video tokens in front."""
    ids = torch.randint(pair.target.num_tokens, (pair.prompt_tokens,), generator=torch.Generator().manual_seed(index))
    generator = torch.Generator(embedding.device).manual_seed(index)
    video = torch.empty(pair.video_tokens, shape.hidden_size, dtype=embedding.dtype, device=embedding.device)
    video.normal_(0.0, _SPREAD, generator=generator)
    text = embedding.index_select(0, ids[pair.video_tokens :].to(embedding.device))
    return ids, torch.cat((video, text))


class RandomFamily(Family):
    """The family of one recipe, without a processor."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        super().__init__(model, None)
        self.recipe = recipe

    @property
    def language_model(self) -> Any:
        return self.model.model

    @property
    def default_num_frames(self) -> int:
        return self.recipe.pair_shape.num_frames

    @property
    def max_frames(self) -> int | None:
        return None

    def num_video_tokens(self, video: Video) -> int:
        return self.recipe.pair_shape.video_tokens

    def encode_parts(self, video: Video, is_cancelled: Callable[[], bool]) -> Iterator[EncodedVideo]:
        """Yields an empty encoding: there is no tower, and a prompt's number determines its embeddings."""
        yield EncodedVideo(
            placeholder_text="", features=torch.empty(0), shape=(0, 0, 0), grid=torch.empty(0, 3, dtype=torch.int64)
        )

    def prepare(
        self, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[EncodedVideo], template: ChatTemplate | None
    ) -> Prompt:
        pair, index = self.recipe.pair_shape, prompt_index(turns[-1].text)
        ids, embeddings = random_prompt(pair, self.recipe.shape, index, decoder.embedding)
        decoder.require_room(len(ids))
        shape = (pair.num_frames, math.isqrt(pair.frame_tokens), math.isqrt(pair.frame_tokens))
        is_video = torch.arange(len(ids), device=embeddings.device) < pair.video_tokens
        return Prompt(
            ids=tuple(ids.tolist()),
            embeddings=embeddings,
            rotary=decoder.prompt_rotary(len(ids)),
            is_video=is_video,
            next_position=len(ids),
            grid=cell_grid(*shape).to(embeddings.device),
            video_shapes=(shape,),
        )


def oracle_tokens(
    reference: Sequence[int], acceptance: float, seed: int, index: int, num_tokens: int
) -> tuple[int, ...]:
    """The reference with a share of 1 - acceptance replaced by other tokens; depends only on seed and prompt index.

    A reference token that the draft does not have is replaced, too.
    """
    random = np.random.default_rng((seed, index))
    is_right = random.random(len(reference)) < acceptance
    others = random.integers(1, num_tokens, len(reference))  # offset of a wrong token from the right one, at least 1
    return tuple(
        token if right and token < num_tokens else (token + int(other)) % num_tokens
        for token, right, other in zip(reference, is_right, others, strict=True)
    )


class OracleDraft(VideoLM):
    """A draft that computes all its forwards, and then proposes what its oracle says.

    The acceptance rate is a property of trained models. Here it is imposed: with a given probability the proposed token
    is the one that the target chose when it ran alone, else another one. So the engine can be measured at that
    acceptance rate. Positions beyond the reference keep the draft's own choice.
    """

    def __init__(self, family: RandomFamily, decoder: Decoder, oracle: Oracle, step: CpuStep | CudaStep | None) -> None:
        super().__init__(family, decoder, frozenset(), step)
        self._oracle = oracle
        self._recipe = family.recipe
        self._indices: dict[tuple[int, ...], int] = {}  # a prompt's text ids (which pruning always keeps) -> its index
        # Of each cache: its length -> the token to propose.
        self._proposals: WeakKeyDictionary[KVCache, dict[int, int]] = WeakKeyDictionary()

    def prepare(self, turns: Sequence[Turn], *others: Any, **more: Any) -> Prompt:
        """As in any model; also remembers the index of the prompt."""
        prompt = super().prepare(turns, *others, **more)
        self._indices[self._words(prompt)] = prompt_index(turns[-1].text)
        return prompt

    def prefill(
        self, prompt: Prompt, cache: KVCache, num_rows: int, observer: QueryObserver | None = None
    ) -> Tensor | None:
        """As in any model; with the first chunk, also determines the tokens to propose for this cache's request."""
        if cache.length == 0 or cache not in self._proposals:
            self._proposals[cache] = self._learn(prompt)
        return super().prefill(prompt, cache, num_rows, observer)

    @torch.inference_mode()
    def step(self, batch: Sequence[StepRows]) -> list[Tensor]:
        """Run the real forward; then set the logit of the oracle's token to infinity."""
        logits = super().step(batch)
        for rows, scores in zip(batch, logits, strict=True):
            token = self._proposals.get(rows.cache, {}).get(rows.cache.length)
            if token is not None:
                scores[-1, token] = float("inf")
        return logits

    def _noise(self, rows: StepRows, sampler: CoupledSampler, prefix: Sequence[int], count: int) -> Tensor:
        """Let the oracle's token win also where several tokens are made in one call."""
        noise, tokens = super()._noise(rows, sampler, prefix, count).clone(), self._proposals.get(rows.cache, {})
        for i, row in enumerate(noise, rows.cache.length + len(rows.ids)):
            if (token := tokens.get(i)) is not None:
                row[token] = float("inf")
        return noise

    def _words(self, prompt: Prompt) -> tuple[int, ...]:
        return prompt.ids[-self._recipe.pair_shape.text_tokens :]

    def _learn(self, prompt: Prompt) -> dict[int, int]:
        oracle, index = self._oracle, self._indices.get(self._words(prompt))
        if index is None:  # not a prompt of a request, for example one that memory is measured with
            return {}
        references = json.loads(Path(oracle.references).read_text(encoding="utf-8"))
        reference = references.get(str(index), [])
        tokens = oracle_tokens(reference, oracle.acceptance, oracle.seed, index, self._recipe.shape.num_tokens)
        return dict(enumerate(tokens, prompt.num_tokens))
