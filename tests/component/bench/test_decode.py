"""Our readers on a short clip, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vidspec_service.bench.decode.readers import Reader
from vidspec_service.bench.decode.run import DecodeOptions, measure_decoding
from vidspec_service.errors import ConfigError


def test_a_file_that_is_no_video_is_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.mp4"
    text.write_text("hello")
    with pytest.raises(ConfigError, match=r"notes\.mp4: The file is text, not a video"):
        measure_decoding(DecodeOptions(rendered_s=0.0, clips=(text,)), lambda *_: None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_reader_of_ours_is_timed() -> None:
    told = list[str]()
    options = DecodeOptions(rendered_s=1.0, num_frames=4, repeats=2)
    report = measure_decoding(options, lambda text, *_: told.append(text))
    written = json.loads(report.to_json())
    (clip,) = written["clips"]
    assert (clip["codec"], clip["num_frames"], clip["frame_size"]) == ("h264", 4, [1280, 720])
    for reader in (Reader.CHILD, Reader.POOL, Reader.ALL_CORES, Reader.COLD):
        assert len(clip["readers"][reader]["wall_s"]) == 2
        assert clip["readers"][reader]["error"] is None
    for reader in (Reader.CHILD, Reader.POOL, Reader.ALL_CORES):
        assert clip["readers"][reader]["difference"] == pytest.approx(0, abs=0.01)
    assert written["repeats"] == 2
    assert any("vidspec, cold" in text for text in told)
