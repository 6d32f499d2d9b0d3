"""Files that are not what they seem: playlists, pictures, archives, code, and containers in containers."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av

from tests.clips import bar_codes, write_sound, write_video
from tests.hostile.boxes import box, boxes, u32
from tests.hostile.seeds import Seeds

_SECRET = "/etc/passwd"
_REMOTE = "http://127.0.0.1:9/video.mp4"


def disguises(seeds: Seeds, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file."""
    yield from _playlists()
    yield from _other_files(seeds)
    yield from _other_codecs(folder)
    yield from _containers_in_containers(seeds, folder)


def _playlists() -> Iterator[tuple[str, bytes]]:
    hls = f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\n{_SECRET}\n#EXT-X-ENDLIST\n"
    lists = {
        "playlist.m3u8": hls,
        "playlist.mp4": hls.replace(_SECRET, _REMOTE),
        "marked.m3u8": "\ufeff" + hls,
        "keys.m3u8": hls.replace("#EXTINF", f'#EXT-X-KEY:METHOD=AES-128,URI="file://{_SECRET}"\n#EXTINF'),
        "list.ffconcat": f"ffconcat version 1.0\nfile {_SECRET}\n",
        "list.txt": f"file '{_SECRET}'\nfile '{_REMOTE}'\n",
        "session.sdp": "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video 9 RTP/AVP 96\r\n",
        "manifest.mpd": f'<?xml version="1.0"?><MPD><Period><BaseURL>{_REMOTE}</BaseURL></Period></MPD>',
        "list.asx": f'<asx version="3.0"><entry><ref href="{_REMOTE}"/></entry></asx>',
        "picture.svg": f'<svg xmlns:x="http://www.w3.org/1999/xlink"><image x:href="file://{_SECRET}"/></svg>',
        "script.avs": f'DirectShowSource("{_SECRET}")',
        "graph.lavfi": "testsrc=size=16384x16384:rate=1000",
        "text.mp4": "This is not a video.\n" * 40,
        "data.json": '{"video": "data:video/mp4;base64,AAAA"}' * 20,
        "page.html": f'<html><video src="{_REMOTE}"></video></html>',
    }
    for name, text in lists.items():
        yield f"disguise: {name}", text.encode()
    for start, name in ((b"\x00\x00\x00\x18ftypisom", "mp4"), (b"\x1aE\xdf\xa3", "mkv"), (b"\x47" + bytes(187), "ts")):
        yield f"disguise: playlist behind the first bytes of {name}", start * 4 + hls.encode()


def _other_files(seeds: Seeds) -> Iterator[tuple[str, bytes]]:
    archive, tape = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("../../etc/video.mp4", seeds.mp4)
    with tarfile.open(fileobj=tape, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("video.mp4"))
    noise = random.Random(0).randbytes(4096)
    starts = {
        "image.png": b"\x89PNG\r\n\x1a\n",
        "image.gif": b"GIF89a\x10\x00\x10\x00",
        "image.jpg": b"\xff\xd8\xff\xe0",
        "image.webp": b"RIFF\x00\x10\x00\x00WEBPVP8 ",
        "image.bmp": b"BM\x00\x10\x00\x00",
        "image.tiff": b"II*\x00",
        "image.jp2": b"\x00\x00\x00\x0cjP  \r\n\x87\n",
        "image.heic": b"\x00\x00\x00\x18ftypheic",
        "image.avif": b"\x00\x00\x00\x18ftypavif",
        "document.pdf": b"%PDF-1.7\n",
        "program": b"\x7fELF\x02\x01\x01",
        "program.exe": b"MZ\x90\x00",
        "sound.wav": b"RIFF\x00\x10\x00\x00WAVEfmt ",
        "sound.flac": b"fLaC",
        "sound.mp3": b"ID3\x04",
        "flash.flv": b"FLV\x01\x05",
        "windows.wmv": b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",
        "noise.mp4": b"\x00\x00\x00\x18ftypisom",
        "noise.mkv": b"\x1aE\xdf\xa3",
        "noise.avi": b"RIFF\x00\x10\x00\x00AVI ",
        "noise.ogv": b"OggS",
        "noise.mpg": b"\x00\x00\x01\xba",
        "noise": b"",
    }
    for name, start in starts.items():
        yield f"disguise: {name}", start + noise
    yield "disguise: archive.zip", archive.getvalue()
    yield "disguise: archive.tar", tape.getvalue()
    yield "disguise: archive.gz", gzip.compress(seeds.mp4)
    yield "disguise: object.pickle", pickle.dumps({"video": seeds.mp4[:500]})
    yield "disguise: nothing", b""
    yield "disguise: one byte", b"\x00"
    yield "disguise: zeros", bytes(65536)
    yield "disguise: ones", b"\xff" * 65536


def _other_codecs(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name, codec, pix_fmt in (
        ("jpeg2000.mov", "jpeg2000", "yuv420p"),
        ("huffyuv.avi", "huffyuv", "rgb24"),
        ("screen.flv", "flashsv", "bgr24"),
        ("raw.avi", "rawvideo", "yuv420p"),
        ("cinepak.avi", "cinepak", "rgb24"),
    ):
        yield f"codec: {name}", write_video(folder / name, bar_codes(3), codec=codec, pix_fmt=pix_fmt).read_bytes()
    yield "codec: sound alone.m4a", write_sound(folder / "sound.m4a").read_bytes()


def _containers_in_containers(seeds: Seeds, folder: Path) -> Iterator[tuple[str, bytes]]:
    yield "nested: mp4 in the mdat of mp4", box(b"ftyp", b"isom" + u32(512)) + box(b"mdat", seeds.mp4)
    yield "nested: mkv in the mdat of mp4", box(b"ftyp", b"isom" + u32(512)) + box(b"mdat", seeds.mkv)
    yield "nested: mp4 after mkv", seeds.mkv + seeds.mp4
    yield "nested: mkv after mp4", seeds.fast_mp4 + seeds.mkv
    yield "nested: playlist after mp4", seeds.fast_mp4 + f"\n#EXTM3U\n{_SECRET}\n".encode()
    yield "nested: two films in one mp4", seeds.fast_mp4 * 2
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        container.add_attachment("../../../etc/cron.d/job", "video/mp4", seeds.mp4)
        stream: Any = container.add_mux_stream("mjpeg", rate=25, width=64, height=64)
        stream.disposition = av.stream.Disposition.attached_pic
        container.start_encoding()
    yield "nested: attachment with a path.mkv", file.getvalue()
    place = next(part for part in boxes(seeds.mp4) if part.path == "moov/trak/mdia/minf/dinf/dref").start
    link = b"\x00\x00\x00\x0curl \x00\x00\x00\x00"  # an empty address that claims to point to another file
    yield (
        "reference: media in another file.mp4",
        seeds.mp4[:place] + seeds.mp4[place:].replace(b"\x00\x00\x00\x0curl \x00\x00\x00\x01", link, 1),
    )
