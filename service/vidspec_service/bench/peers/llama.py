"""ik_llama.cpp through its C interface: a prompt's embeddings in, greedy tokens out. Runs in a child process.

The loop is the plain one of its own examples: greedy, and for speculation so many tokens of the draft, then all of them
in one batch of the target. Between two calls of the library there is a lookup in its logits, some microseconds.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidspec_models.errors import ModelLoadError
from vidspec_models.loading.spec import BUNDLED, ModelSpec, model_path
from vidspec_service.bench.peers.gguf_file import write_gguf

CONTEXT = 1024  # tokens
MOST_DRAFT_TOKENS = 63

_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)  # for its log

Embeddings = NDArray[np.float32]  # [P, hidden size], of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """Times are of the monotonic clock."""

    ids: tuple[int, ...]  # the end token included
    began: float
    prefilled: float  # the target's prompt is done, and the first token known
    times: tuple[float, ...]  # of what was committed together; the first once the draft's prompt is done, too
    num_judged: int = 0  # as `SpeculationStats` has it
    num_accepted: int = 0


class LlamaModel:
    """One model with one sequence in its cache."""

    def __init__(self, path: Path, threads: int) -> None:
        """Raises ModelLoadError for a file that it cannot read."""
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
        self._tokens = _Batch(api, MOST_DRAFT_TOKENS + 1, 0)
        self.length = 0

    def prefill(self, embeddings: Embeddings) -> int:
        """The token after a new prompt."""
        self._api.llama_kv_cache_clear(self._context)
        self._prompt.rows[: embeddings.size] = embeddings.ravel()
        self._prompt.wants[: len(embeddings) - 1] = 0
        self.length = 0
        (found,) = self._decode(self._prompt, len(embeddings), num_wanted=1)
        return found

    def step(self, ids: Sequence[int], num_wanted: int) -> list[int]:
        """Append tokens; the likeliest after each of the last `num_wanted` of them."""
        self._tokens.ids[: len(ids)] = ids
        self._tokens.wants[: len(ids) - num_wanted] = 0
        return self._decode(self._tokens, len(ids), num_wanted)

    def cut(self, length: int) -> None:
        """Forget every row from `length` on."""
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
    """Memory of the library's, as arrays."""

    def __init__(self, api: Any, size: int, width: int) -> None:
        """Of embeddings of this width, or of tokens where it is 0."""
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


class LlamaPair:
    """Target and draft of a pair in one process, one after the other, as their own examples have it."""

    def __init__(self, weights: str, threads: int, end_id: int) -> None:
        """`weights` is GGML's name of a type; the bundled pair's. The draft has one thread, which is its fastest."""
        with TemporaryDirectory(prefix="vidspec-gguf-") as folder:
            found = []
            for role, count in (("target", threads), ("draft", 1)):
                path = Path(folder) / f"{role}.gguf"
                write_gguf(Path(model_path(ModelSpec(path=BUNDLED, role=role))), weights, path)
                found.append(LlamaModel(path, count))
        self._target, self._draft = found
        self._end_id = end_id

    def answer(self, target: Embeddings, draft: Embeddings, max_tokens: int, num_draft_tokens: int) -> PeerAnswer:
        """Greedy, the target alone without draft tokens; embeddings of the same prompt for either."""
        began = time.monotonic()
        ids = [self._target.prefill(target)]
        prefilled = time.monotonic()
        if num_draft_tokens:
            self._draft.prefill(draft)
        times, num_judged, num_accepted = [time.monotonic()], 0, 0
        while len(ids) < max_tokens and ids[-1] != self._end_id:
            pending = self._drafted(ids, len(draft), num_draft_tokens)
            chosen = self._target.step([ids[-1], *pending], 1 + len(pending))
            right = next((i for i, (a, b) in enumerate(zip(pending, chosen, strict=False)) if a != b), len(pending))
            for token in chosen[: right + 1]:
                ids.append(token)
                if token == self._end_id or len(ids) == max_tokens:
                    break
            times.append(time.monotonic())
            self._target.cut(len(target) + len(ids) - 1)
            self._draft.cut(min(self._draft.length, len(draft) + len(ids) - 1))
            num_judged, num_accepted = num_judged + right + (right < len(pending)), num_accepted + right
        return PeerAnswer(
            ids=tuple(ids),
            began=began,
            prefilled=prefilled,
            times=tuple(times),
            num_judged=num_judged,
            num_accepted=num_accepted,
        )

    def _drafted(self, ids: Sequence[int], num_prompt_rows: int, count: int) -> list[int]:
        """So many tokens after `ids`, up to the end token."""
        found: list[int] = []
        feed = list(ids[self._draft.length - num_prompt_rows :])
        while len(found) < count:
            found += self._draft.step(feed, 1)
            if found[-1] == self._end_id:
                break
            feed = found[-1:]
        return found
