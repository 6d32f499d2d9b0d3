"""Assisted generation of stock transformers, with the draft as assistant. Runs in a child process.

`generate` does not pass a video's frames to the assistant, which would then propose without seeing the video. So both
models get the prompt through their input tables (see `stock_language`); nothing else is changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from vidspec_service.bench.peers.pair import PeerAnswer, PromptEmbeddings, Step, sample_of_stream


class AssistedPair:
    """The bundled pair in float32. Target and draft take turns on the same threads."""

    def __init__(self, _weights: str, threads: int, _end_id: int, _prompts: Sequence[PromptEmbeddings]) -> None:
        import torch

        from vidspec_service.bench.peers.stock_language import StockLanguageModel

        logging.disable(logging.WARNING)  # transformers warns of how its own assistant is called
        torch.set_num_threads(threads)
        self._target, self._draft = StockLanguageModel("target"), StockLanguageModel("draft")

    def answer(self, prompt: PromptEmbeddings, max_tokens: int, num_draft_tokens: int) -> PeerAnswer:
        """Greedy, with the same number of draft tokens in every step."""
        import torch

        from vidspec_models.reference.stock import Stopwatch

        (places,) = self._target.extend([prompt.target])
        self._draft.extend([prompt.draft])
        assistant = self._draft.model
        assistant.generation_config.num_assistant_tokens = num_draft_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        ids, streamer = torch.tensor([places]), Stopwatch()
        began = time.monotonic()
        with torch.inference_mode():
            found = self._target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                assistant_model=assistant,
                streamer=streamer,
            )
        answer = found[0, ids.shape[1] :].tolist()
        steps = list(map(Step, streamer.times[1:], streamer.counts[1:]))
        # The first step prefills both prompts and verifies the first draft tokens, so the prefill is timed separately.
        prefill_s = self._target.prefill_s(prompt.target)
        return sample_of_stream(len(prompt.target), answer, steps, num_draft_tokens, began=began, untimed=1), prefill_s
