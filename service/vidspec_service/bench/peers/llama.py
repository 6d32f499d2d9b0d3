"""ik_llama.cpp through its C interface: takes a prompt's embeddings, gives greedy tokens. Runs in a child process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from vidspec_models.errors import ModelLoadError
from vidspec_service.bench.peers.checkpoint import checkpoint_of, language_config, language_tensors
from vidspec_service.bench.peers.pair import CONTEXT, MAX_DRAFT_TOKENS, Embeddings, Pair, PromptEmbeddings, StepModel

_TENSORS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
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
_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)  # for its log


def write_gguf(checkpoint: Path, weights: str, output: Path) -> None:
    """Write the Qwen2 decoder of a Hugging Face folder with weights in a GGML type, without a vocabulary.

    Vectors stay float32, as usual in GGUF files.
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
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_TENSORS[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"blk.{layer}.{_TENSORS[inner]}.{kind}"


class LlamaModel(StepModel):
    """One model with one sequence in its cache."""

    def __init__(self, path: Path, threads: int) -> None:
        """Raises ModelLoadError for a file that cannot be loaded."""
        from ik_llama_cpp import _ctypes_api as api

        self._api, self._library = api, api._lib
        self._library.llama_log_set(_SILENCE, None)
        self._library.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        self._library.llama_get_logits.argtypes = [ctypes.c_void_p]
        self._library.llama_kv_cache_seq_rm.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 3]
        ours, params = api.llama_model_default_params(), api.llama_context_default_params()
        ours.n_gpu_layers = 0
        params.n_ctx = params.n_batch = params.n_ubatch = CONTEXT
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = True
        model = api.llama_model_load_from_file(str(path).encode(), ours)
        self._context = model and api.llama_init_from_model(model, params)
        if not self._context:
            raise ModelLoadError(f"ik_llama.cpp cannot load {path}")
        self._vocabulary = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
        self._prompt = _Batch(api, CONTEXT, api.llama_model_n_embd(model))
        self._tokens = _Batch(api, MAX_DRAFT_TOKENS + 1, 0)
        self.length = 0

    def prefill(self, embeddings: Embeddings) -> int:
        self._api.llama_kv_cache_clear(self._context)
        self._prompt.rows[: embeddings.size] = embeddings.ravel()
        self._prompt.wants[: len(embeddings) - 1] = 0
        self.length = 0
        (found,) = self._decode(self._prompt, len(embeddings), num_wanted=1)
        return found

    def step(self, ids: Sequence[int], num_wanted: int) -> list[int]:
        self._tokens.ids[: len(ids)] = ids
        self._tokens.wants[: len(ids) - num_wanted] = 0
        return self._decode(self._tokens, len(ids), num_wanted)

    def truncate(self, length: int) -> None:
        self._library.llama_kv_cache_seq_rm(self._context, 0, length, -1)
        self.length = length

    def _decode(self, batch: _Batch, count: int, num_wanted: int) -> list[int]:
        batch.wants[count - num_wanted : count] = 1
        batch.places[:count] = np.arange(self.length, self.length + count)
        batch.raw.n_tokens = count
        if status := self._api.llama_decode(self._context, batch.raw):
            raise RuntimeError(f"llama_decode returned {status}")
        self.length += count
        logits = self._library.llama_get_logits(self._context)
        found: list[int] = np.ctypeslib.as_array(logits, (num_wanted, self._vocabulary)).argmax(1).tolist()
        return found


class _Batch:
    """A batch of the library, with its memory as numpy arrays."""

    def __init__(self, api: Any, size: int, width: int) -> None:
        """`width` is that of the embeddings; 0 makes a batch of token ids."""
        self.raw = api.llama_batch_init(size, width, 1)
        if width:
            self.rows = np.ctypeslib.as_array(self.raw.embd, (size * width,))
        else:
            self.ids = np.ctypeslib.as_array(self.raw.token, (size,))
        self.places = np.ctypeslib.as_array(self.raw.pos, (size,))
        self.wants = np.ctypeslib.as_array(self.raw.logits, (size,))
        np.ctypeslib.as_array(self.raw.n_seq_id, (size,))[:] = 1
        for row in range(size):
            self.raw.seq_id[row][0] = 0


def llama_pair(weights: str, threads: int, end_id: int, _: Sequence[PromptEmbeddings]) -> Pair:
    """The bundled pair; `weights` names a GGML type. The draft has one thread, with which it is fastest."""
    return Pair(_load("target", weights, threads), _load("draft", weights, 1), end_id)


def _load(role: str, weights: str, threads: int) -> LlamaModel:
    with TemporaryDirectory(prefix="vidspec-gguf-") as folder:
        path = Path(folder) / f"{role}.gguf"
        write_gguf(checkpoint_of(role), weights, path)
        return LlamaModel(path, threads)
