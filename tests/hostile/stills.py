"""Images: valid ones of every supported kind, and bombs; none stored."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from tests.clips import Picture

SIDE = 16_384


def corners() -> Picture:
    """Quarters from the top left: red, green; blue, grey. 96x64."""
    picture = np.zeros((64, 96, 3), np.uint8)
    picture[:32, :48] = (230, 20, 20)
    picture[:32, 48:] = (20, 230, 20)
    picture[32:, :48] = (20, 20, 230)
    picture[32:, 48:] = (128, 128, 128)
    return picture


def still(kind: str, *, orientation: int | None = None, mode: str = "RGB", **options: object) -> bytes:
    """`corners` as a file; `orientation` is the EXIF value, 1 to 8."""
    image = Image.fromarray(corners()).convert(mode)
    exif = image.getexif()
    if orientation is not None:
        exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif, quality=98, **options)
    return file.getvalue()


def still_bombs() -> Iterator[tuple[str, bytes]]:
    """Small files that would decode to large images."""
    png = still("PNG")
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    huge = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(bytes(3 * SIDE * 200)))
    yield "PNG of 16k x 16k", png[:8] + huge + _chunk(b"IEND", b"")
    yield "PNG with 256 MiB of text", _with(png, _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 28))))
    yield "PNG with 256 MiB of profile", _with(png, _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 28))))
    jpeg = bytearray(still("JPEG"))
    place = jpeg.index(b"\xff\xc0")
    jpeg[place + 5 : place + 9] = struct.pack(">HH", SIDE, SIDE)
    yield "JPEG of 16k x 16k", bytes(jpeg)
    yield "JPEG that never ends", still("JPEG")[:-2] + b"\xff\x00" * 100_000
    yield "a thousand PNGs", png * 1000


def _with(png: bytes, chunk: bytes) -> bytes:
    """The PNG with another chunk after its first."""
    return png[:33] + chunk + png[33:]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
