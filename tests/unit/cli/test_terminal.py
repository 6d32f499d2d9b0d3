"""Output while the workers load: bars in a terminal, lines in a log; and what a model may write to a terminal."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from vidspec_service.cli.terminal import loading_display, printable, printable_json


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_each_worker_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with loading_display() as tell:
        tell("target", "loading weights", 0.25)
        tell("draft", "compiling and measuring", None)
    shown = screen.getvalue()
    assert "target: loading weights" in shown
    assert "25%" in shown
    assert "draft: compiling and measuring" in shown


def test_a_log_has_a_line_only_when_a_load_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with caplog.at_level(logging.INFO), loading_display() as tell:
        for second in range(25):
            now = 100.0 + second
            tell("target", "loading weights", second / 100)
    lines = [vars(record) for record in caplog.records]
    assert [(line["worker"], line["step"], line["percent"]) for line in lines] == [
        ("target", "loading weights", 10),
        ("target", "loading weights", 20),
    ]


def test_a_log_tells_at_once_of_a_step_of_unknown_length(caplog: pytest.LogCaptureFixture) -> None:
    """Kernels are compiled for minutes after weights that load in no time."""
    with caplog.at_level(logging.INFO), loading_display() as tell:
        tell("target", "loading weights", 1.0)
        tell("target", "compiling and measuring", None)
    lines = [vars(record) for record in caplog.records]
    assert [(line["worker"], line["step"], line["percent"]) for line in lines] == [
        ("target", "compiling and measuring", None)
    ]


def test_nothing_is_drawn_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_display() as tell:
        tell("target", "loading weights", 0.5)
    assert capsys.readouterr() == ("", "")


def test_a_model_cannot_send_escape_sequences_to_a_terminal() -> None:
    assert printable("a\x1b[2Jb\rc\x07\nd\te é\u202e\u2028\x85") == "a[2Jbc\nd\te é"


def test_json_has_the_same_text_without_a_character_that_a_terminal_obeys() -> None:
    said = {"content": "a\x1b[2Jb\x9b2J\x7f\nQuick brown 狐"}
    shown = printable_json(said)
    assert json.loads(shown) == said
    assert printable(shown) == shown
    assert "狐" in shown


@pytest.mark.parametrize(
    "text", ["10\u202f000\u00a0km", "赤い\u3000球", "می\u200cرود", "👨\u200d👩\u200d👧", "\U0001fae9"]
)
def test_spaces_joiners_and_the_newest_emoji_are_text(text: str) -> None:
    assert printable(text) == text
