"""A CUDA stream beside the decoding one, for prompts: a vision tower at work does not stand between two steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vidspec_models.inputs import Prompt


class SideStream:
    """One for each model, on the device that its prompts are made on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, make: Callable[[], Prompt]) -> Prompt:
        """`make` a prompt on this stream, wait for it in this thread so that it is whole, and hand it over.

        Handed over to the decoding stream: nothing made here later takes its memory while that one still reads it.
        Memory belongs to the stream it was made on. Without this a prompt that is dropped, or replaced by a shorter
        one, could be overwritten by the next one before a read that was only asked for has happened.
        """
        with torch.cuda.stream(self._stream):
            prompt = make()
        self._stream.synchronize()
        decoding = torch.cuda.current_stream(self._stream.device)
        made = (prompt.embeddings, *prompt.rotary, prompt.is_video, prompt.grid, prompt.layer_additions)
        for tensor in made:
            if tensor is not None:
                tensor.record_stream(decoding)
        return prompt
