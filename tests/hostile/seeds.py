"""Seeds: small sound clips of every container, rendered once, from which everything hostile is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from tests.clips import bar_codes, write_video

_REALTIME = {"deadline": "realtime", "cpu-used": "8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """24 frames of 64x64 pixels each, and whole files all."""

    mp4: bytes
    fast_mp4: bytes  # its index comes first
    fragmented_mp4: bytes
    mov: bytes
    mkv: bytes
    webm: bytes
    ts: bytes
    mpg: bytes
    avi: bytes
    mjpeg: bytes

    def all(self) -> list[bytes]:
        """In the order above."""
        return [getattr(self, field.name) for field in fields(self)]


def render_seeds(folder: Path) -> Seeds:
    """Render them into `folder`; nothing there is needed afterwards."""
    pictures = bar_codes(24)

    def content(name: str, codec: str = "h264", pix_fmt: str = "yuv420p", **more: object) -> bytes:
        path = write_video(folder / name, pictures, codec=codec, pix_fmt=pix_fmt, **more)  # type: ignore[arg-type]
        return path.read_bytes()

    return Seeds(
        mp4=content("seed.mp4", with_audio=True),
        fast_mp4=content("fast.mp4", muxing={"movflags": "+faststart"}),
        fragmented_mp4=content("fragmented.mp4", muxing={"movflags": "frag_keyframe+empty_moov"}),
        mov=content("seed.mov", "mpeg4", rotation=90),
        mkv=content("seed.mkv"),
        webm=content("seed.webm", "vp8", options=_REALTIME),
        ts=content("seed.ts", with_audio=True),
        mpg=content("seed.mpg", "mpeg2video"),
        avi=content("seed.avi", "mpeg4"),
        mjpeg=content("mjpeg.avi", "mjpeg", "yuvj420p"),
    )
