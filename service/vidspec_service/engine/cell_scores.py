"""CellScores: one number a video cell, from the target to the draft in shared memory.

A long clip has thousands of cells; that is too much for a channel that must never fill up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vidspec_service.engine.messages import Relevance


@dataclass(frozen=True, slots=True, kw_only=True)
class CellScores:
    """What the target's text pays attention to: one number a cell, the largest of them 1."""

    request_id: str
    grid_checksum: int  # of the target's cells; the draft's may be others
    values: NDArray[np.float16]  # [C]


def write_scores(scores: CellScores) -> int:
    """Into a new memfd; the caller owns (and closes) the returned descriptor."""
    fd = os.memfd_create("vidspec-relevance", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(scores.values.tobytes())
    return fd


def read_scores(message: Relevance, fd: int) -> CellScores:
    """On the draft's side; closes `fd`."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)  # the descriptors share a position, which writing has moved
        values = np.frombuffer(file.read(), np.float16)
    return CellScores(request_id=message.request_id, grid_checksum=message.grid_checksum, values=values)
