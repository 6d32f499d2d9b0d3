"""One reader on one clip in a process of its own: `python -m ...worker READER CLIP REPEATS INDEX...`; JSON to stdout.

Timed are repeated reads of the same frames after one that is not counted; starting and importing are not.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from vidspec_service.bench.decode.libraries import Pictures, Read, library, library_version
from vidspec_service.bench.decode.options import Reader
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.decoding.selection import FrameRequest

GRID = 8  # each picture is told by the means of so many squares a side


def main() -> None:
    """Measure and print, or print why not."""
    reader, path = Reader(sys.argv[1]), sys.argv[2]
    repeats, indices = int(sys.argv[3]), [int(text) for text in sys.argv[4:]]
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what libraries print is no result
        json.dump(_measure(reader, path, repeats, indices), out)


def _measure(reader: Reader, path: str, repeats: int, indices: Sequence[int]) -> dict[str, object]:
    try:
        read = _read_as_child() if reader is Reader.CHILD else library(reader)
        version = "" if reader is Reader.CHILD else library_version(reader)
        pictures = read(path, indices)
        wall_s, cpu_s = [], []
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            read(path, indices)
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(time.process_time() - cpu)
    except Exception as error:  # a library that does not load or decode is a row without figures
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    return {"version": version, "wall_s": wall_s, "cpu_s": cpu_s, "means": [means(picture) for picture in pictures]}


def means(picture: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> list[float]:
    """What a picture looks like from afar, whatever its size: GRID x GRID means of its brightness."""
    height, width = (side - side % GRID for side in picture.shape[:2])
    squares = picture[:height, :width].reshape(GRID, height // GRID, GRID, width // GRID, 3)
    return [round(float(value), 2) for value in squares.mean(axis=(1, 3, 4)).ravel()]


def _read_as_child() -> Read:
    """The work of a decode child, frames chosen by us as always: `indices` came from the same choice."""
    from vidspec_service.decoding.reader import read_clip

    def read(path: str, indices: Sequence[int]) -> Pictures:
        mappings = list[mmap.mmap]()

        def allocate(num_bytes: int) -> memoryview:
            mappings.append(mmap.mmap(-1, num_bytes))
            return memoryview(mappings[0])

        request = FrameRequest(num_frames=len(indices))
        with open(path, "rb", buffering=0) as file:
            decoded = read_clip(file, request, DecodingLimits(), allocate, default_num_frames=len(indices))
        shape = (len(decoded.timestamps_s), decoded.height, decoded.width, 3)
        return list(np.frombuffer(mappings[0], np.uint8, count=decoded.num_bytes).reshape(shape))

    return read


if __name__ == "__main__":
    main()
