"""MP4 files as nested boxes: finds boxes and changes files, keeping all sizes valid or breaking them on purpose."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_PARENTS = {"moov", "trak", "mdia", "minf", "dinf", "stbl", "edts", "udta"}


class Box(NamedTuple):
    """One box: its path ("moov/trak/tkhd"), its first byte and its length with the header of eight bytes."""

    path: str
    start: int
    length: int

    @property
    def payload(self) -> int:
        return self.start + 8


def boxes(data: bytes, start: int = 0, end: int | None = None, parent: str = "") -> Iterator[Box]:
    """Every box of a well-formed file, parents first."""
    end = len(data) if end is None else end
    while start + 8 <= end:
        length, kind = struct.unpack_from(">I4s", data, start)
        path = f"{parent}/{kind.decode('latin-1')}".lstrip("/")
        yield Box(path, start, length)
        if path.rpartition("/")[2] in _PARENTS:
            yield from boxes(data, start + 8, start + length, path)
        start += length


def find(data: bytes, path: str) -> Box:
    """The first box of that path."""
    return next(box for box in boxes(data) if box.path == path)


def overwritten(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def patched(data: bytes, path: str, offset: int, new: bytes) -> bytes:
    """Overwrite a box's payload with `new` from `offset` on; negative offsets are in its header."""
    return overwritten(data, find(data, path).payload + offset, new)


def u16(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


def u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *(value & 0xFFFFFFFF for value in values))


def box(kind: bytes, payload: bytes = b"") -> bytes:
    """A new box."""
    return struct.pack(">I4s", 8 + len(payload), kind) + payload
