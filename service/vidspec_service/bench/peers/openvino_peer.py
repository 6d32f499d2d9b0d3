"""OpenVINO GenAI's own pipelines, target alone and speculative. Runs in a child process.

The pipelines take ids, so the models have extra ids for the rows of the prompts (see `stock_language`).
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from vidspec_service.bench.peers.pair import PeerAnswer, PromptEmbeddings, Step, sample_of_stream

_ARITHMETIC = {"f32": {"INFERENCE_PRECISION_HINT": "f32"}}  # otherwise OpenVINO uses bfloat16 if the processor has it


class OpenVinoPair:
    """The bundled pair. Target and draft take turns on all threads, with which the draft is fastest here."""

    def __init__(self, weights: str, threads: int, end_id: int, prompts: Sequence[PromptEmbeddings]) -> None:
        """`weights` as in `write_openvino`. With f32, arithmetic is in f32, too; otherwise the library chooses."""
        import torch

        from vidspec_service.bench.peers.openvino_file import write_openvino
        from vidspec_service.bench.peers.stock_language import StockLanguageModel

        logging.disable(logging.WARNING)  # tracing warns of branches; a wrong branch would show as wrong answers
        warnings.simplefilter("ignore")
        torch.set_num_threads(threads)
        with TemporaryDirectory(prefix="vidspec-openvino-") as folder:
            paths = {role: Path(folder) / role for role in ("target", "draft")}
            for role, path in paths.items():
                language = StockLanguageModel(role)
                self._ids = language.extend([getattr(prompt, role) for prompt in prompts])  # the same for both roles
                path.mkdir()
                write_openvino(language, weights, path)
            self._open(paths, {"INFERENCE_NUM_THREADS": threads} | _ARITHMETIC.get(weights, {}))
        self._end_id = end_id

    def _open(self, paths: dict[str, Path], properties: dict[str, Any]) -> None:
        import openvino_genai

        self._genai = openvino_genai
        paging = openvino_genai.SchedulerConfig()
        paging.cache_size = 1  # GB
        paging.max_num_batched_tokens = 2048  # more than a prompt, so that it is prefilled in one batch
        paging.enable_prefix_caching = False  # so that no prompt is served from the cache
        draft = openvino_genai.draft_model(paths["draft"], "CPU", **properties)
        given = {"scheduler_config": paging, **properties}
        self._alone = openvino_genai.LLMPipeline(paths["target"], "CPU", **given)
        self._pair = openvino_genai.LLMPipeline(paths["target"], "CPU", draft_model=draft, **given)

    def answer(self, prompt: PromptEmbeddings, max_tokens: int, num_draft_tokens: int) -> PeerAnswer:
        """Answer greedily; with 0 draft tokens, by the target alone."""
        from openvino import Tensor

        config = self._genai.GenerationConfig(max_new_tokens=max_tokens, do_sample=False)
        config.eos_token_id, config.stop_token_ids = self._end_id, {self._end_id}
        if num_draft_tokens:
            config.num_assistant_tokens = num_draft_tokens
        ids = np.array([self._ids[prompt.index]])
        inputs = self._genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids)))
        steps: list[Step] = []
        pipeline = self._pair if num_draft_tokens else self._alone
        began = time.monotonic()
        found = pipeline.generate(inputs, config, _streamer(self._genai, steps))
        # The draft's prompt is prefilled after the first token, in the same step as its first draft tokens.
        untimed = 2 if num_draft_tokens else 1
        sample = sample_of_stream(
            len(prompt.target), found.tokens[0], steps, num_draft_tokens, began=began, untimed=untimed
        )
        return sample, steps[0].time - began


def _streamer(genai: Any, steps: list[Step]) -> Any:
    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def write(self, ids: int | list[int]) -> Any:
            steps.append(Step(time.monotonic(), 1 if isinstance(ids, int) else len(ids)))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    return Streamer()
