"""Upload folders: created, checked, cleaned of what killed servers left; another server's folder is never touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vidspec_service.api.uploads.folder import check_upload_dir, upload_folder
from vidspec_service.errors import ConfigError

_HOLD = """
import sys
from pathlib import Path
from vidspec_service.api.uploads.folder import upload_folder
with upload_folder(Path(sys.argv[1]) if len(sys.argv) > 1 else None) as folder:
    (folder / "upload-1-x").write_bytes(b"private")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which private folders are created."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def held_by_another(*chosen: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A server that runs until the end of the block, and its folder, which has a file in it."""
    command = [sys.executable, "-c", _HOLD, *map(str, chosen)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def test_a_private_folder_is_for_nobody_else_and_goes_with_its_server(parent: Path) -> None:
    with upload_folder(None) as folder:
        (folder / "upload").touch()
        assert folder.parent == parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(parent.iterdir()) == []


def test_the_uploads_of_a_killed_server_are_deleted_at_the_next_start_however_soon_that_is(
    parent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with held_by_another() as (process, left):
        process.send_signal(signal.SIGKILL)
    assert list(left.iterdir())
    with upload_folder(None) as folder:
        assert list(parent.iterdir()) == [folder]
    (line,) = caplog.records
    assert (line.message, vars(line)["folder"]) == ("uploads of a killed server deleted", str(left))


def test_so_are_those_in_a_chosen_folder_whatever_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with held_by_another(tmp_path) as (process, left):
        process.send_signal(signal.SIGKILL)
    assert list(left.iterdir())
    with upload_folder(tmp_path):
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_those_of_a_server_that_runs_stay(parent: Path) -> None:
    with held_by_another() as (_, others), upload_folder(None) as folder:
        assert set(parent.iterdir()) == {folder, others}
        assert list(others.iterdir())
    assert list(parent.iterdir()) == []


def test_those_of_another_user_stay(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = parent / "vidspec-uploads-left"
    left.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with upload_folder(None):
        assert left.exists()


def test_what_only_looks_like_one_is_left_alone(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    mine = tmp_path_factory.mktemp("mine")
    (mine / "precious").touch()
    (parent / "vidspec-uploads-link").symlink_to(mine)
    (parent / "vidspec-uploads-file").touch()
    (parent / "vidspec-new-unlocked").mkdir()  # of a server that is starting
    with upload_folder(None):
        assert len(list(parent.iterdir())) == 4
    assert (mine / "precious").exists()


def test_a_folder_that_is_gone_at_the_end_is_no_error(parent: Path) -> None:
    with upload_folder(None) as folder:
        folder.rmdir()
    assert list(parent.iterdir()) == []


def test_a_folder_that_cannot_be_or_takes_no_files_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "folder", Path("/proc")):
        with pytest.raises(ConfigError, match=f"cannot use upload_dir {folder}: "):
            check_upload_dir(folder)
