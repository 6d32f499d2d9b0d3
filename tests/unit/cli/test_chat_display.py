"""What `vidspec chat` shows while it waits."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console, RenderableType
from rich.spinner import Spinner

from vidspec_service.cli.chat_display import ChatProgress, summary_lines

FINAL = {
    "usage": {"completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 0}},
    "videos": [{"warnings": [], "num_frames": 8, "duration_s": 4.0}],
    "speculation": {"mode": "off", "acceptance_rate": 0.0},
    "timings": {
        "queue_s": 0.0,
        "decode_s": 0.125,
        "prefill_s": 0.5,
        "time_to_first_token_s": 0.63,
        "time_per_output_token_s": 0.0,
    },
}


def test_an_answer_of_one_token_has_no_rate_and_speculation_that_is_off_no_acceptance() -> None:
    assert list(summary_lines(FINAL)) == [
        "1 tokens, first after 0.63 s (decode 0.12, queue 0.00, prefill 0.50); speculation off; 8 frames of 4.0 s"
    ]


def test_a_summary_says_how_much_of_the_answer_is_reasoning() -> None:
    usage = {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 7}}
    (line,) = summary_lines({**FINAL, "usage": usage})
    assert line.startswith("9 tokens (7 of them reasoning), first after")


def _drawn(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(shown)
    return console.export_text()


def test_a_bar_is_shown_until_the_file_is_read_and_a_spinner_with_the_phase_after(tmp_path: Path) -> None:
    path = tmp_path / "clip [hd].mp4"
    path.write_bytes(b"12345")
    progress = ChatProgress()
    with progress.sending(path) as file:
        file.read(3)
        (shown,) = progress.get_renderables()
        assert not isinstance(shown, Spinner)
        assert "sending clip [hd].mp4" in _drawn(shown)
        file.read()
        (shown,) = progress.get_renderables()
    assert isinstance(shown, Spinner)
    assert str(shown.text) == "decoding the video"
