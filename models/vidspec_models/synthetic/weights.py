"""A random language model of a given shape, made where and in the precision that it will run in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from vidspec_models.synthetic.shapes import PairShape, Shape

_SPREAD = 0.02  # of embeddings and weights, as transformers initialises them


def random_language_model(shape: Shape, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' own class, no number of it ever in another place or precision. Changes torch's global seed.

    Rows of the head beyond the tokens are zero: as in a trained model they never win.
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


def random_prompt(pair: PairShape, shape: Shape, index: int, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """Prompt `index`: token ids [P] on CPU, and embeddings [P, hidden size] like `embedding`, video tokens in front."""
    ids = torch.randint(pair.target.num_tokens, (pair.prompt_tokens,), generator=torch.Generator().manual_seed(index))
    generator = torch.Generator(embedding.device).manual_seed(index)
    video = torch.empty(pair.video_tokens, shape.hidden_size, dtype=embedding.dtype, device=embedding.device)
    video.normal_(0.0, _SPREAD, generator=generator)
    text = embedding.index_select(0, ids[pair.video_tokens :].to(embedding.device))
    return ids, torch.cat((video, text))
