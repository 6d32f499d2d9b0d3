"""Seeds: small valid clips of every container, rendered once, from which all hostile files are made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from tests.clips import bar_codes, write_video

_REALTIME = {"deadline": "realtime", "cpu-used": "8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """Complete files with 24 frames of 64x64 pixels each (128x96 if the codec needs that)."""

    mp4: bytes
    fast_mp4: bytes  # its index is at the start
    fragmented_mp4: bytes
    mov: bytes
    mkv: bytes
    webm: bytes
    ts: bytes
    mpg: bytes
    avi: bytes
    mjpeg: bytes
    gif: bytes
    apng: bytes
    flv: bytes
    wmv: bytes
    mxf: bytes
    threegp: bytes
    divx: bytes
    ffv1: bytes
    qtrle: bytes
    png: bytes
    h264: bytes
    hevc: bytes

    def all(self) -> list[bytes]:
        """All seeds in the order above."""
        return [getattr(self, field.name) for field in fields(self)]


def render_seeds(folder: Path) -> Seeds:
    """Render the seeds in `folder`, which is not needed afterwards."""
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
        gif=content("seed.gif", "gif", "rgb8"),
        apng=content("seed.apng", "apng", "rgb24"),
        flv=content("seed.flv", "flv"),
        wmv=content("seed.wmv", "wmv2"),
        mxf=content("seed.mxf", "mpeg2video", rate=25),
        threegp=write_video(folder / "seed.3gp", bar_codes(24, 128, 96), codec="h263").read_bytes(),
        divx=content("divx.avi", "msmpeg4"),
        ffv1=content("ffv1.mkv", "ffv1"),
        qtrle=content("qtrle.mov", "qtrle", "rgb24"),
        png=content("png.mov", "png", "rgb24"),
        h264=content("seed.h264"),
        hevc=content("seed.hevc", "hevc"),
    )
