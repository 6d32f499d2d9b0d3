"""A CUDA stream beside the decoding one, for prompts: a vision tower at work does not stand between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
