"""File signatures: supported containers pass, everything else is refused by name."""

from __future__ import annotations

import pytest

from vidspec_service.decoding.signatures import HEAD_BYTES, check_signature
from vidspec_service.errors import VideoUnsupported

pytestmark = pytest.mark.unit

TS_PACKET = b"\x47" + bytes(187)


@pytest.mark.parametrize(
    "head",
    [
        b"\x00\x00\x00\x20ftypisom",
        b"\x00\x00\x00\x14ftypqt  ",
        b"\x00\x00\x10\x00moov",
        b"\x00\x00\x00\x08wide\x00\x00",
        b"\x1aE\xdf\xa3\x9fB\x86",
        b"RIFF\x00\x00\x00\x00AVI LIST",
        b"OggS\x00\x02",
        b"\x00\x00\x01\xba\x44",
        b"IMKH\x01\x01",
        (TS_PACKET * 3 + bytes(188) + TS_PACKET * 30)[:HEAD_BYTES],  # begins well
        (b"\x00\x00\x00\x00" + TS_PACKET) * 2,
        b"FLV\x01\x05",
        b"0&\xb2u\x8ef\xcf\x11\xa6\xd9\x00\xaa\x00b\xcel",
        b"\x06\x0e+4\x02\x05\x01\x01\r\x01\x02\x01",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(17) + b"\x00\x00\x00\x08acTL",
        b"\x1f\x07\x00\xbf",
        b"\x00\x00\x00\x01\x67\x64",
        b"\x00\x00\x00\x01\x06\x05",
        b"\x00\x00\x01\x09\xf0",
        b"\x00\x00\x00\x01\x40\x01\x0c",
        b"\x00\x00\x00\x01\x42\x01\x01",
        b"\x00\x00\x01\x46\x01\x50",
        b"\x00\x00\x00\x01\x4e\x01\x05",
    ],
)
def test_containers_pass(head: bytes) -> None:
    check_signature(head)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\x08IDAT" + b"acTL", "a PNG image"),
        (b"\xff\xd8\xff\xe0", "a JPEG image"),
        (b"RIFF\x00\x00\x00\x00WEBP", "a WebP image"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x12", "an animated WebP image"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x10", "a WebP image"),  # with transparency
        (b"RIFF\x00\x00\x00\x00WEBPVP8X", "a WebP image"),  # cut
        (b"\x00\x00\x00\x01\x87\x64", "of an unknown kind"),
        (b"\x00\x00\x01\xb3", "of an unknown kind"),
        (b"\x00\x00\x01\x02\x01\xd0", "of an unknown kind"),  # a picture of H.265, which no stream begins with
        (b"RIFF\x00\x00\x00\x00WAVE", "a WAV audio file"),
        (b"RIFF\x00\x00\x00\x00ABCD", "of an unknown kind"),
        (b"\x00\x00\x00\x1cftypavif", "a HEIF or AVIF image"),
        (b"ID3\x04", "an MP3 audio file"),
        (b"PK\x03\x04", "a ZIP archive"),
        (b"%PDF-1.7", "a PDF document"),
        (b"#EXTM3U\n/etc/passwd\n", "a playlist"),
        (b"ffconcat version 1.0", "a playlist"),
        (b"v=0\r\no=- 0 0 IN IP4 127.0.0.1", "text"),
        (b"<!doctype html>", "text"),
        (b"Good morning", "text"),  # begins as a transport stream does
        (b"\x7fELF\x02\x01", "of an unknown kind"),
        (b"\x47" + bytes(200), "of an unknown kind"),
        (b"\x00", "of an unknown kind"),
        (b"", "of an unknown kind"),
    ],
)
def test_everything_else_is_refused_by_name(head: bytes, name: str) -> None:
    with pytest.raises(VideoUnsupported, match=f"The file is {name}, not a video") as caught:
        check_signature(head)
    assert caught.value.param == "video"


def test_a_webp_image_without_an_extended_header_is_not_taken_for_an_animation() -> None:
    check_signature(b"RIFF\x00\x00\x00\x00WEBPVP8 \x0a\x00\x00\x00\x12", is_still=True)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"RIFF\x00\x00\x00\x00AVI LIST", "a video"),
        (b"RIFF\x00\x00\x00\x00WAVE", "a WAV audio file"),
        (b"RIFX\x00\x00\x00\x00WEBP", "of an unknown kind"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x12", "an animated WebP image"),
    ],
)
def test_what_is_not_an_image_is_refused_as_one(head: bytes, name: str) -> None:
    with pytest.raises(VideoUnsupported, match=rf"The file is {name}\. Accepted as an image are"):
        check_signature(head, is_still=True)
