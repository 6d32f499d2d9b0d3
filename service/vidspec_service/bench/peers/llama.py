"""ik_llama.cpp through its C interface: takes a prompt's embeddings, gives greedy tokens. Runs in a child process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vidspec_models.errors import ModelLoadError
from vidspec_service.bench.peers.pair import CONTEXT, MAX_DRAFT_TOKENS, Embeddings, Pair, PromptEmbeddings, StepModel

if TYPE_CHECKING:
    from vidspec_service.bench.peers.stock_language import StockLanguageModel

_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)  # for its log


def write_gguf(language: StockLanguageModel, weights: str, output: Path) -> None:
    """Write the decoder with weights in a GGML type, without a vocabulary; vectors stay float32, as usual there."""
    import gguf

    config = language.decoder.config
    kind = gguf.GGMLQuantizationType[weights.upper()]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    writer = gguf.GGUFWriter(output, "qwen2")
    writer.add_name(output.stem)
    writer.add_tokenizer_model("no_vocab")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in language.decoder.state_dict().items():
        numbers = tensor.numpy()
        as_kind = gguf.GGMLQuantizationType.F32 if numbers.ndim == 1 else kind
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(theirs, gguf.quantize(numbers, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaModel(StepModel):
    """One model with one sequence in its cache."""

    def __init__(self, role: str, weights: str, threads: int) -> None:
        """`weights` names a GGML type. Raises ModelLoadError if the library cannot load its file."""
        from ik_llama_cpp import _ctypes_api as api

        from vidspec_service.bench.peers.stock_language import StockLanguageModel

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
        with TemporaryDirectory(prefix="vidspec-gguf-") as folder:
            path = Path(folder) / f"{role}.gguf"
            write_gguf(StockLanguageModel(role), weights, path)
            model = api.llama_model_load_from_file(str(path).encode(), ours)
        self._context = model and api.llama_init_from_model(model, params)
        if not self._context:
            raise ModelLoadError(f"ik_llama.cpp cannot load the {role} in {weights}")
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
    """The bundled pair. The draft has one thread, with which it is fastest."""
    return Pair(LlamaModel("target", weights, threads), LlamaModel("draft", weights, 1), end_id)
