"""Exit codes and final messages of the process."""

from __future__ import annotations

import errno
import io
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vidspec_models.errors import ModelLoadError
from vidspec_service import __main__ as process
from vidspec_service.cli.terminal import say
from vidspec_service.end_signals import obeyed_signals
from vidspec_service.errors import ConfigError, ContextLengthExceeded, VideoUnreadable


def _ending_with(outcome: BaseException | int) -> SimpleNamespace:
    def run(_: object) -> int:
        if isinstance(outcome, int):
            return outcome
        raise outcome

    return SimpleNamespace(run=run)


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (ConfigError("port 80 is taken"), 2, "vidspec: port 80 is taken\n"),
        (ModelLoadError("they share no tokenizer"), 2, "vidspec: they share no tokenizer\n"),
        (VideoUnreadable("It is damaged.", param="video"), 1, "vidspec: It is damaged.\n"),
        (ContextLengthExceeded("It is too long."), 1, "vidspec: It is too long.\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/m"), 2, "vidspec: /root/m: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_ending_has_its_exit_code_and_at_most_one_line(
    outcome: BaseException | int,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process, "parse", lambda _: (_ending_with(outcome), None))
    assert process.main() == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_signal_ends_a_command_that_then_cleans_up(number: int, is_ignored: bool) -> None:
    """`timeout` and `docker stop` send them; a container's first process must have a handler to end by one at all."""
    code = f"""
import signal
from types import SimpleNamespace
from vidspec_service import __main__ as process

def run(_):
    try:
        signal.raise_signal({number})
        return 0
    finally:
        print("cleaned up")

if {is_ignored}:
    signal.signal({number}, signal.SIG_IGN)
process.parse = lambda _: (SimpleNamespace(run=run), None)
raise SystemExit(process.main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0 if is_ignored else 128 + number, "cleaned up\n")


@pytest.mark.parametrize("number", obeyed_signals())  # not SIGHUP under nohup
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_signal_ends_a_command_that_is_imported_whatever_a_library_makes_of_it(number: int, is_ignored: bool) -> None:
    code = f"""
import signal
from types import SimpleNamespace
from vidspec_service import __main__ as process

def parse(_):
    try:
        signal.raise_signal({number})
    except KeyboardInterrupt:  # as pydantic does
        pass
    return SimpleNamespace(run=lambda _: 0), None

if {is_ignored}:
    signal.signal({number}, signal.SIG_IGN)
process.parse = parse
raise SystemExit(process.main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0 if is_ignored else 128 + number, "")


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--prot"], "vidspec serve: unknown flag"), (["--max-frames", "none"], "vidspec: --max-frames: ")],
)
def test_a_wrong_command_line_or_setting_is_one_line_and_code_2(
    argv: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["vidspec", "serve", *argv])
    assert process.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "variables", "reason"),
    [
        (["--log-format", "json", "--max-frames", "none"], {}, "--max-frames: "),
        (["--max-frames", "none"], {"VIDSPEC_LOG_FORMAT": "json"}, "--max-frames: "),
        (["--prot", "1"], {"VIDSPEC_LOG_FORMAT": "json"}, "vidspec serve: unknown flag --prot"),
        (["--config", "CONFIG"], {}, "max_frames in "),
        ([], {"VIDSPEC_CONFIG": "CONFIG"}, "max_frames in "),
        (["--config", "TYPO"], {}, "unknown key in "),
        (["--config"], {"VIDSPEC_LOG_FORMAT": "json"}, "vidspec serve: argument --config: "),
        (["--log-format"], {"VIDSPEC_LOG_FORMAT": "json"}, "vidspec serve: argument --log-format: "),
    ],
)
def test_a_server_that_logs_json_says_in_json_why_it_cannot_start(
    argv: list[str],
    variables: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    config = tmp_path / "config.yaml"
    config.write_text("log_format: json\nmax_frames: none\n")
    typo = tmp_path / "typo.yaml"
    typo.write_text("log_format: json\nmax_frame: 5\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("CONFIG", str(config)))
    argv = [word.replace("CONFIG", str(config)).replace("TYPO", str(typo)) for word in argv]
    monkeypatch.setattr("sys.argv", ["vidspec", "serve", *argv])
    assert process.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["event"]) == ("error", "cannot start")
    assert told["reason"].startswith(reason)


def test_a_working_folder_that_was_deleted_is_one_line_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr("sys.argv", ["vidspec", "serve", "--model", "models/mine"])
    assert process.main() == 2
    assert capsys.readouterr().err == "vidspec: the working folder has been deleted; change to one that exists\n"


def test_a_letter_that_the_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    monkeypatch.setattr(process, "parse", lambda _: (SimpleNamespace(run=lambda _: say("a→ü")), None))
    process.main()
    assert shown.getvalue() == b"a\\u2192\xfc\n"


def test_a_full_disk_is_one_line_and_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vidspec_service", "render-clip", "--seed", "1", str(tmp_path / "clip.mp4")]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (1, "vidspec: cannot write the output: No space left on device\n")


def test_a_command_does_its_work_also_where_nobody_reads_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vidspec_service", "render-clip", "--seed", "1", str(tmp_path / "clip.mp4")]
    ended = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], timeout=60, check=False)
    assert ended.returncode == 0
    assert (tmp_path / "clip.mp4").stat().st_size
