"""Small files that claim to be, or expand to be, huge: 16k x 16k pictures, tables of billions, endless durations."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import av

from tests.hostile.boxes import box, find, overwritten, patched, u16, u32
from tests.hostile.seeds import Seeds

_HUGE = 0xFFFFFFFF
_SIDE = 16384


def bombs(seeds: Seeds) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file."""
    yield from _pictures(seeds)
    yield from _tables(seeds)
    yield from _times(seeds)
    yield from _lengths(seeds)


def _pictures(seeds: Seeds) -> Iterator[tuple[str, bytes]]:
    mp4, side = seeds.mp4, u16(_SIDE, _SIDE)
    yield "bomb: 16k in the sample entry.mp4", patched(mp4, "moov/trak/mdia/minf/stbl/stsd", 40, side)
    yield "bomb: 16k in the track header.mp4", patched(mp4, "moov/trak/tkhd", 76, u32(_SIDE << 16, _SIDE << 16))
    yield "bomb: no size at all.mp4", patched(mp4, "moov/trak/mdia/minf/stbl/stsd", 40, u16(0, 0))
    yield "bomb: 65535 wide and 1 high.mp4", patched(mp4, "moov/trak/mdia/minf/stbl/stsd", 40, u16(65535, 1))
    yield "bomb: 16k in the sequence header.ts", _muxed("mpegts", "h264", [_h264(_SIDE, 1)] * 60)
    yield "bomb: 5 megapixels with 16 references.ts", _muxed("mpegts", "h264", [_h264(2304, 16)] * 60)
    yield "bomb: small, then 16k.ts", seeds.ts + _muxed("mpegts", "h264", [_h264(_SIDE, 1)] * 60)
    jpeg = seeds.mjpeg
    while (place := jpeg.find(b"\xff\xc0\x00\x11\x08")) >= 0:  # start of frame: height and width follow
        jpeg = overwritten(jpeg, place, b"\xff\xc2\x00\x11\x08" + side)  # progressive: keeps all coefficients in memory
    yield "bomb: 16k in every JPEG.avi", jpeg
    vp8 = seeds.webm
    at = vp8.index(b"\x9d\x01\x2a")
    yield "bomb: 16k in the VP8 key frame.webm", overwritten(vp8, at + 3, struct.pack("<HH", 16383, 16383))


def _tables(seeds: Seeds) -> Iterator[tuple[str, bytes]]:
    table = "moov/trak/mdia/minf/stbl/"
    for kind in ("stts", "stss", "stsc", "stco", "ctts"):
        yield f"bomb: {kind} of 4 billion entries.mp4", patched(seeds.mp4, table + kind, 4, u32(_HUGE))
    yield "bomb: 4 billion samples of 1 byte.mp4", patched(seeds.mp4, table + "stsz", 4, u32(1, _HUGE))
    yield "bomb: 2 billion empty samples.mp4", patched(seeds.mp4, table + "stsz", 4, u32(0, 0x7FFFFFFF))
    yield "bomb: a sample of 2 GiB.mp4", patched(seeds.mp4, table + "stsz", 12, u32(0x7FFFFFFF))
    yield "bomb: one time step for all samples ever.mp4", patched(seeds.mp4, table + "stts", 8, u32(_HUGE, 1))
    yield "bomb: samples beyond the end.mp4", patched(seeds.mp4, table + "stco", 8, u32(0xFFFFFF00))
    yield "bomb: ten thousand nested boxes.mp4", seeds.mp4[:32] + _nested(b"moov", 10_000)
    yield "bomb: a hundred thousand free boxes.mp4", seeds.mp4[:32] + box(b"free") * 100_000
    yield "bomb: 129 tracks.mkv", _tracks(129)
    yield "bomb: 300 tracks.mkv", _tracks(300)


def _times(seeds: Seeds) -> Iterator[tuple[str, bytes]]:
    mp4, media = seeds.mp4, "moov/trak/mdia/mdhd"
    yield "time: a time scale of zero.mp4", patched(mp4, media, 12, u32(0))
    yield "time: a time scale of 4 billion.mp4", patched(mp4, media, 12, u32(_HUGE))
    yield (
        "time: one tick a second, a day a frame.mp4",
        patched(patched(mp4, media, 12, u32(1)), "moov/trak/mdia/minf/stbl/stts", 12, u32(86400)),
    )
    yield "time: frames 4 billion ticks apart.mp4", patched(mp4, "moov/trak/mdia/minf/stbl/stts", 12, u32(_HUGE))
    yield "time: all frames at once.mp4", patched(mp4, "moov/trak/mdia/minf/stbl/stts", 12, u32(0))
    yield "time: an edit of minus 2 billion.mp4", patched(mp4, "moov/trak/edts/elst", 8, u32(_HUGE, 0x80000000))
    yield "time: an edit at zero speed.mp4", patched(mp4, "moov/trak/edts/elst", 16, u32(0))
    yield "time: a stated duration of 4 billion.mp4", patched(mp4, "moov/mvhd", 16, u32(_HUGE))
    picture = _first_packet(seeds.webm)
    for name, scale, stamps in (
        ("before zero", 1000, [-90_000 + 40 * i for i in range(5)]),
        ("backwards", 1000, [1000 - 40 * i for i in range(5)]),
        ("a century later", 1000, [0, 40, 3_155_760_000_000]),
        ("a million frames a second", 1_000_000, range(50)),
        ("half of all time", 1000, [0, 2**62 // 1_000_000]),
    ):
        yield f"time: {name}.mkv", _muxed("matroska", "vp8", [picture] * len(stamps), stamps, scale)
    yield "time: no stamps at all.h264 in avi", _muxed("avi", "mpeg4", [b"\x00\x00\x01\xb6\x10"] * 9)


def _lengths(seeds: Seeds) -> Iterator[tuple[str, bytes]]:
    media = find(seeds.mp4, "mdat")
    yield "length: mdat of 4 GiB.mp4", overwritten(seeds.mp4, media.start, u32(0xFFFFFFFF))
    yield "length: mdat to the end.mp4", overwritten(seeds.mp4, media.start, u32(0))
    yield "length: mdat shorter than its header.mp4", overwritten(seeds.mp4, media.start, u32(4))
    yield "length: moov of zero bytes.mp4", patched(seeds.mp4, "moov", -8, u32(0))
    yield "length: a box of 2 to the 63.mp4", seeds.mp4[:32] + u32(1) + b"free" + struct.pack(">Q", 2**63 - 1)
    void = b"\xec\x01" + (2**55).to_bytes(7, "big")
    yield "length: a void of 2 to the 55.mkv", seeds.mkv[:64] + void
    yield "length: clusters of unknown size.mkv", seeds.mkv.replace(b"\x1f\x43\xb6\x75", b"\x1f\x43\xb6\x75\xff", 1)
    yield "length: a chunk of 4 GiB.avi", seeds.avi.replace(b"movi", b"movi00dc\xff\xff\xff\xff", 1)
    yield "endless: empty transport packets.ts", (b"\x47\x1f\xff\x10" + b"\xff" * 184) * 20_000
    yield "endless: system headers.mpg", (b"\x00\x00\x01\xba" + b"\x44\x00\x04\x00\x04\x01\x00\x01\x89\xf8") * 100_000
    yield "endless: empty pages.ogv", (b"OggS\x00\x02" + bytes(20) + b"\x00") * 50_000
    yield "endless: empty elements.mkv", seeds.mkv[:64] + b"\xec\x80" * 500_000
    yield "endless: junk chunks.avi", seeds.avi[:12] + b"JUNK\x00\x00\x00\x00" * 100_000
    yield "zero frames: a header alone.mkv", _muxed("matroska", "vp8", [])
    yield "zero frames: a header alone.mp4", _muxed("mp4", "mpeg4", [])
    yield "zero frames: nothing decodes.mkv", _muxed("matroska", "vp9", [b"\xff" * 50] * 20)
    yield "zero frames: empty frames.mkv", _muxed("matroska", "vp8", [b"\x00"] * 20)


def _nested(kind: bytes, depth: int) -> bytes:
    return b"".join(struct.pack(">I4s", 8 * (depth - level), kind) for level in range(depth))


def _tracks(count: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        for _ in range(count):
            container.add_mux_stream("vp8", rate=25, width=64, height=64)
        container.start_encoding()
    return file.getvalue()


def _first_packet(clip: bytes) -> bytes:
    with av.open(io.BytesIO(clip), "r") as container:
        return bytes(next(container.demux(video=0)))


def _muxed(
    container_format: str, codec: str, packets: Sequence[bytes], stamps: Sequence[int] | None = None, scale: int = 25
) -> bytes:
    """One video track with packets of any content; `stamps` in ticks of 1/`scale` seconds."""
    file = io.BytesIO()
    with av.open(file, "w", format=container_format, options={"avoid_negative_ts": "disabled"}) as container:
        stream: Any = container.add_mux_stream(codec, rate=25, width=64, height=64)
        stream.time_base = Fraction(1, scale)
        container.start_encoding()
        for index, content in enumerate(packets):
            packet: Any = av.Packet(content)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, scale), True
            packet.pts = index if stamps is None else stamps[index]
            # Muxers require decode times that increase and precede the presentation times.
            packet.dts = index if stamps is None else min(stamps) - len(stamps) + index
            container.mux_one(packet)
    return file.getvalue()


def _h264(side: int, num_refs: int) -> bytes:
    """A keyframe of `side` x `side`: sequence header, picture header, and a slice of garbage."""
    macroblocks = side // 16 - 1
    sequence = _bits("010000100000000000111110", 0, 0, 2, num_refs, "0", macroblocks, macroblocks, "1100")
    picture = _bits(0, 0, "00", 0, 0, 0, "000", 0, 0, 0, "000")
    return b"".join(
        b"\x00\x00\x00\x01" + unit for unit in (b"\x67" + sequence, b"\x68" + picture, b"\x65\xb8\x04" + b"\x5a" * 60)
    )


def _bits(*fields: str | int) -> bytes:
    """Literal bits for strings, Exp-Golomb codes for numbers; a stop bit and padding at the end."""
    text = "".join(field if isinstance(field, str) else _golomb(field) for field in fields) + "1"
    text += "0" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8, "big")


def _golomb(value: int) -> str:
    digits = f"{value + 1:b}"
    return "0" * (len(digits) - 1) + digits
