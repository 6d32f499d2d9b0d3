"""ONNX Runtime on the file that its GenAI package builds: from embeddings to greedy tokens. Runs in a child process.

The package's own generator takes ids, not embeddings. So this module drives the session below it, in the same way: keys
and values are written into the buffer of the earlier ones, and dropped rows are no longer counted in the length.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vidspec_models.errors import ModelLoadError
from vidspec_service.bench.peers.pair import CONTEXT, Embeddings, Pair, PromptEmbeddings, StepModel

if TYPE_CHECKING:
    from vidspec_service.bench.peers.stock_language import StockLanguageModel

_BUILD_TIMEOUT_S = 600.0  # it takes some seconds
_BUILDER = "onnxruntime_genai.models.builder"  # a script with non-standard imports, not made to be imported


class OnnxModel(StepModel):
    """One model with one sequence in its cache."""

    def __init__(self, role: str, weights: str, threads: int) -> None:
        """`weights` names a precision of the builder."""
        import onnxruntime

        from vidspec_service.bench.peers.stock_language import StockLanguageModel

        language = StockLanguageModel(role)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # errors
        with TemporaryDirectory(prefix="vidspec-onnx-") as folder:
            build_onnx(language, weights, Path(folder))
            path = Path(folder) / "model.onnx"
            self._session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy
        config = language.decoder.config
        shape = (1, config.num_key_value_heads, CONTEXT, config.hidden_size // config.num_attention_heads)
        self._binding = self._session.io_binding()
        self._binding.bind_output("logits")  # bound first, so that it is the first of the outputs
        for name in (f"{i}.{what}" for i in range(config.num_hidden_layers) for what in ("key", "value")):
            values = self._value(np.zeros(shape, np.float32))
            self._binding.bind_ortvalue_input(f"past_key_values.{name}", values)
            self._binding.bind_ortvalue_output(f"present.{name}", values)
        self._table = language.model.get_input_embeddings().weight.detach().numpy()
        self._mask = np.ones((1, CONTEXT), np.int64)
        self.length = 0

    def prefill(self, embeddings: Embeddings) -> int:
        self.length = 0
        (found,) = self._run(embeddings, num_wanted=1)
        return found

    def step(self, ids: Sequence[int], num_wanted: int) -> list[int]:
        return self._run(self._table[list(ids)], num_wanted)

    def truncate(self, length: int) -> None:
        self.length = length

    def _run(self, rows: Embeddings, num_wanted: int) -> list[int]:
        self.length += len(rows)
        self._binding.bind_ortvalue_input("inputs_embeds", self._value(rows[None]))
        self._binding.bind_ortvalue_input("attention_mask", self._value(self._mask[:, : self.length]))
        self._binding.bind_output("logits")  # bound again, because the shape changes
        self._session.run_with_iobinding(self._binding)
        logits: Any = self._binding.get_outputs()[0].numpy()
        found: list[int] = logits[0, -num_wanted:].argmax(-1).tolist()
        return found


def onnx_pair(weights: str, threads: int, end_id: int, _: Sequence[PromptEmbeddings]) -> Pair:
    """The bundled pair. The draft has one thread, with which it is fastest."""
    return Pair(OnnxModel("target", weights, threads), OnnxModel("draft", weights, 1), end_id)


def build_onnx(language: StockLanguageModel, weights: str, output: Path) -> None:
    """Build a folder with a decoder that takes embeddings. Raises ModelLoadError if the builder fails."""
    from safetensors.torch import save_file

    with TemporaryDirectory(prefix="vidspec-qwen2-") as given:
        language.decoder.config.architectures = ["Qwen2ForCausalLM"]
        language.decoder.config.save_pretrained(given)
        language.tokenizer.save_pretrained(given)
        tensors = {f"model.{name}": tensor for name, tensor in language.decoder.state_dict().items()}
        save_file(tensors, Path(given) / "model.safetensors", metadata={"format": "pt"})
        arguments = ["-i", given, "-o", str(output), "-p", weights, "-e", "cpu", "-c", given]
        command = [sys.executable, "-m", _BUILDER, *arguments, "--extra_options", "exclude_embeds=true"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ModelLoadError("the builder of ONNX Runtime GenAI takes too long") from None
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ModelLoadError(f"the builder of ONNX Runtime GenAI cannot build {weights}: {last}")
