"""SharedFrames: a clip's frames in memory that is passed to other processes as a descriptor, without a copy.

The memory is anonymous (memfd): it vanishes with its last holder, however that process ends. It is sealed: no process
can change what another one sees.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

Frames = NDArray[np.uint8]
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SharedFrames(np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]):
    """Frames [T, H, W, 3]. Arrays made from them, for example a slice, have no descriptor."""

    descriptor: int | None  # open as long as the array lives

    def __array_finalize__(self, made_of: object) -> None:
        self.descriptor = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickle as an ordinary array, which a pickler need not copy; it would copy a subclass."""
        return np.asarray(self).__reduce_ex__(protocol)

    @classmethod
    def sealed(cls, memory: int, shape: tuple[int, int, int, int]) -> SharedFrames:
        """Seal the memory of this descriptor, which stays the caller's, and map it as read-only frames.

        Raises ValueError if the memory's size does not fit `shape`, OSError if it cannot be mapped or sealed.
        """
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        if os.fstat(memory).st_size != np.prod(shape):
            raise ValueError("the memory is not of the stated shape")
        frames = mapped(memory, shape, mmap.PROT_READ).view(cls)
        frames.descriptor = os.dup(memory)
        weakref.finalize(frames, os.close, frames.descriptor)
        return frames


def mapped(memory: int, shape: tuple[int, ...], protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> Frames:
    """Sealed memory as an array, unmapped with it; writes are private to it. Raises OSError or ValueError.

    A private mapping, since kernels before 6.7 refuse shared ones of sealed memory; nothing is copied.
    """
    mapping = mmap.mmap(memory, int(np.prod(shape)), flags=mmap.MAP_PRIVATE, prot=protection)
    return np.frombuffer(mapping, np.uint8).reshape(shape)
