"""The folder of a server's uploads: one of its own, locked while it lives. Deletes what killed servers left."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vidspec_service.errors import ConfigError

_NEW = "vidspec-new-"  # not locked yet
_PREFIX = "vidspec-uploads-"

_log = logging.getLogger(__name__)


@contextmanager
def upload_folder(chosen: Path | None) -> Iterator[Path]:
    """Yield a private folder in `chosen`, or else in the system's for such; it is deleted at the end.

    Raises ConfigError.
    """
    parent = check_upload_dir(chosen)
    _sweep(parent)
    with _locked(Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))) as folder:
        yield folder


def check_upload_dir(chosen: Path | None) -> Path:
    """The folder that uploads go to. Raises ConfigError unless files can be created there.

    Also called before models load for minutes.
    """
    try:
        folder = Path(tempfile.gettempdir()) if chosen is None else chosen
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        name = "" if chosen is None else f" {chosen}"
        raise ConfigError(f"cannot use upload_dir{name}: {error.strerror}; name a folder to write to") from error


@contextmanager
def _locked(new: Path) -> Iterator[Path]:
    """Lock the folder, to tell other servers that its owner lives; the kernel unlocks it however the owner ends."""
    descriptor, folder = _open(new), new.with_name(new.name.replace(_NEW, _PREFIX))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield new.rename(folder)  # only now: others delete a folder of this name that is not locked
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Delete the folders of servers that were killed: the uploads are private, and nobody else deletes them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another user's, or another server uses or deletes it
            descriptor = _open(folder)
            try:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                _log.info("uploads of a killed server deleted", extra={"folder": str(folder)})
            finally:
                os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
