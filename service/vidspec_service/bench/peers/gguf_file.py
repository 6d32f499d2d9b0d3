"""A checkpoint's language model as the file that llama.cpp and its forks read. Runs in a child process."""

from __future__ import annotations

from pathlib import Path

from vidspec_service.bench.peers.checkpoint import language_config, language_tensors

_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(checkpoint: Path, weights: str, output: Path) -> None:
    """The Qwen2 decoder of a folder in Hugging Face's format, weights as GGML's type of that name; without vocabulary.

    Vectors stay float32, as in every such file.
    """
    import gguf

    config = language_config(checkpoint)
    kind = gguf.GGMLQuantizationType[weights.upper()]
    writer = gguf.GGUFWriter(output, "qwen2")
    writer.add_name(checkpoint.name)
    writer.add_tokenizer_model("no_vocab")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in language_tensors(checkpoint).items():
        numbers = tensor.numpy()
        as_kind = gguf.GGMLQuantizationType.F32 if numbers.ndim == 1 else kind
        writer.add_tensor(_their_name(name), gguf.quantize(numbers, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _their_name(name: str) -> str:
    if name == "embed_tokens.weight":
        return "token_embd.weight"
    if name == "norm.weight":
        return "output_norm.weight"
    _, layer, inner = name.split(".", 2)
    module, _, kind = inner.rpartition(".")
    return f"blk.{layer}.{_TENSORS[module]}.{kind}"
