"""A second CUDA stream, for preparing prompts, so that a running vision tower does not delay decoding steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vidspec_models.prompt import Prompt


class SideStream:
    """One per model, on the device where its prompts are prepared."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, make: Callable[[], Prompt]) -> Prompt:
        """Make a prompt on this stream, wait in this thread until it is complete, and hand it to the decoding stream.

        Memory belongs to the stream that allocated it, and is reused there. Without `record_stream`, a prompt that is
        dropped, or replaced by a shorter one, could be overwritten by the next prompt while reads of it are still
        queued on the decoding stream.
        """
        with torch.cuda.stream(self._stream):
            prompt = make()
        self._stream.synchronize()
        decoding = torch.cuda.current_stream(self._stream.device)
        made = (prompt.embeddings, *prompt.rotary, prompt.is_video, prompt.grid, prompt.deepstack)
        for tensor in made:
            if tensor is not None:
                tensor.record_stream(decoding)
        return prompt
