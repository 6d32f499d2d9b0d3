"""A CUDA stream beside the decoding one, for prompts: a vision tower at work does not stand between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vidspec_models.inputs import Prompt


class SideStream:
    """On other devices it is nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Work inside goes to this stream; leaving waits for it in this thread, so that results are whole."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def hand_over(self, prompt: Prompt) -> Prompt:
        """The prompt, for the decoding stream: nothing made here later takes its memory while that one still reads it.

        Memory belongs to the stream it was made on. Without this one that is dropped, or replaced by a shorter one,
        could be overwritten by the next prompt before a read that was only asked for has happened.
        """
        if self._stream is not None:
            decoding = torch.cuda.current_stream(self._stream.device)
            for tensor in (
                prompt.embeddings,
                *prompt.rotary,
                prompt.is_video,
                prompt.grid,
                prompt.layer_additions,
            ):
                if tensor is not None:
                    tensor.record_stream(decoding)
        return prompt
