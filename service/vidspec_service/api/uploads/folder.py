"""The folder that uploads are written to: the operator's, or a private one. Deletes what killed servers left."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vidspec_service.api.uploads.upload import FILE_PREFIX
from vidspec_service.errors import ConfigError

_PREFIX = "vidspec-uploads-"
_SETTLED_S = 60.0  # a younger folder may be one whose server has not locked it yet

_log = logging.getLogger(__name__)


@contextmanager
def upload_folder(chosen: Path | None) -> Iterator[Path]:
    """Yield `chosen`, created and swept, or else a private folder that is deleted at the end. Raises ConfigError."""
    if chosen is None:
        _sweep_private(Path(tempfile.gettempdir()))
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, _locked(Path(folder)):
            yield Path(folder)
        return
    check_upload_dir(chosen)
    sweep(chosen)
    yield chosen


def check_upload_dir(chosen: Path) -> None:
    """Raises ConfigError unless files can be created in `chosen`. Also called before models load for minutes."""
    try:
        chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen):
            pass
    except OSError as error:
        raise ConfigError(f"cannot use upload_dir {chosen}: {error.strerror}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder, to tell other servers that its owner lives; the kernel unlocks it however the owner ends."""
    descriptor = _open(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep_private(parent: Path) -> None:
    """Delete the folders of servers that were killed: the uploads are private, and nobody else deletes them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another user's, or another server uses or deletes it
            descriptor = _open(folder)
            try:
                found = os.fstat(descriptor)
                if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _SETTLED_S:
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                _log.info("uploads of a killed server deleted", extra={"folder": str(folder)})
            finally:
                os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def sweep(directory: Path) -> None:
    """Delete the uploads that ended servers left in `directory`; call it before the first upload."""
    for path in directory.glob(f"{FILE_PREFIX}*"):
        if _belongs_to_another(path.name):
            continue
        with suppress(OSError):
            path.unlink()


def _belongs_to_another(name: str) -> bool:
    """Whether the process that wrote the file still runs, and is not this one (which has written nothing yet)."""
    owner = name.removeprefix(FILE_PREFIX).partition("-")[0]
    return owner.isdecimal() and int(owner) != os.getpid() and Path("/proc", owner).exists()
