"""Small random language models of three families, with weights large enough to reveal mistakes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

FAMILIES = ["qwen2", "qwen3", "llama"]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def build(family: str, **changes: int) -> Any:
    """A model with the same weights every time; `changes` override SIZES."""
    torch.manual_seed(0)
    sizes = {**SIZES, **changes}
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
        for layer in model.model.layers:  # biases start as zeros, which would hide a mistake
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(projection.bias, std=0.5)
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters={"rope_type": "linear", "factor": 2.0}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)  # with the small initial weights all logits would be alike
    return model.eval()
