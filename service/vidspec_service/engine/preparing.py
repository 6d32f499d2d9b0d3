"""Preparer: prompts are prepared in a thread of their own, so that a vision tower at work does not stop the streams.

The tower, the processor and the embedding are read-only and release the interpreter while they compute; the worker's
loop goes on decoding meanwhile. Finished prompts wake the loop through a descriptor that it polls with its channels.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vidspec_models.encoded_videos import EncodedVideos
from vidspec_models.errors import ContextOverflow
from vidspec_models.inputs import Prompt
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.conversion import prepare_prompt
from vidspec_service.engine.messages import Generate

Shorten = Callable[[Generate, Prompt], Prompt]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Received, and nothing done for it yet. The payload is a descriptor that preparing closes."""

    request: Generate
    payload: int
    received: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt, or why there is none."""

    waiting: Waiting
    result: Prompt | Exception
    queue_s: float
    prepare_s: float


class Preparer:
    """One prompt at a time, in the order of submission; `shorten` has the last word on each."""

    def __init__(self, model: VideoLM, encoded_bytes: int, shorten: Shorten = lambda _, prompt: prompt) -> None:
        """`encoded_bytes` of features stay for further questions about their videos."""
        self._encoded = EncodedVideos(encoded_bytes)
        self._model = model
        self._shorten = shorten
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        self._done: deque[Prepared] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable as soon as a prompt is finished."""
        return self._wake

    def submit(self, waiting: Waiting) -> None:
        """Prepare this one after those before it."""
        self._thread.submit(self._prepare, waiting)

    def finished(self) -> list[Prepared]:
        """Everything finished since the last call."""
        if not self._done:
            return []
        try:
            num_finished = os.eventfd_read(self._wake)  # as many as were written: one beyond them is still to wake us
        except BlockingIOError:
            return []
        return [self._done.popleft() for _ in range(num_finished)]

    def _prepare(self, waiting: Waiting) -> None:
        started = time.monotonic()
        result: Prompt | Exception
        try:
            result = self._shorten(waiting.request, prepare_prompt(self._model, waiting.payload, self._encoded))
        except ContextOverflow as error:
            result = error
        except Exception as error:  # whatever it is, it is this request's: it must not end the worker, again and again
            logger.exception("request %s could not be prepared", waiting.request.request_id)
            result = ValueError(f"the prompt could not be prepared ({type(error).__name__})")
        self._done.append(Prepared(waiting, result, started - waiting.received, time.monotonic() - started))
        os.eventfd_write(self._wake, 1)
