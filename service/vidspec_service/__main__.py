"""The console script `vidspec`: runs one command and turns what went wrong into one line and an exit code.

0 done; 1 it was tried and failed; 2 the command line, a setting or a model does not work; 130 interrupted; 128 + number
of a signal that ended a command other than a server.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from pathlib import Path

from vidspec_models.errors import ModelError
from vidspec_service.cli.parsing import UsageError, parse
from vidspec_service.cli.terminal import DISK_FULL, note
from vidspec_service.end_signals import ending_at_signals, exiting_at_signals
from vidspec_service.errors import ConfigError, ServiceError

FAILED = 1
UNUSABLE = 2
INTERRUPTED = 130

_log = logging.getLogger(__name__)


def main() -> int:
    """Run the command of `sys.argv`."""
    # Python has None for a stream that whoever started us has closed, as cron jobs and init scripts do.
    sys.stdin = sys.stdin or Path(os.devnull).open()  # noqa: SIM115
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is shown as \u2192
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _require_working_folder()
        with ending_at_signals():
            command, args = parse(sys.argv[1:])
        with exiting_at_signals():
            return command.run(args)
    except UsageError as error:
        _tell(error, str(error))
    except (ServiceError, ModelError) as error:
        _tell(error, f"vidspec: {error}")
        return UNUSABLE if isinstance(error, ConfigError | ModelError) else FAILED
    except PermissionError as error:  # a path below a folder that this user may not look into
        if error.filename is None:
            raise
        _tell(error, f"vidspec: {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # `vidspec ... | head`: nobody reads on
        if error.errno not in (errno.EPIPE, *DISK_FULL):
            raise
        if error.errno in DISK_FULL:
            note(f"vidspec: cannot write {error.filename or 'the output'}: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter's own flush must not fail
        return FAILED
    return UNUSABLE


def _require_working_folder() -> None:
    """Raises UsageError in a folder that was deleted: libraries would end the processes that need them."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("vidspec: the working folder has been deleted; change to one that exists") from None


def _tell(error: Exception, line: str) -> None:
    """Print the line; for a server that logs JSON, log an event instead."""
    if sys.argv[1:2] in (["serve"], ["serve-ray"]):
        from vidspec_service.settings import requested_log_format
        from vidspec_service.telemetry import configure_logging

        if requested_log_format(sys.argv[2:]) == "json":
            configure_logging("error", "json")
            _log.error("cannot start", extra={"reason": str(error)})
            return
    note(line)


if __name__ == "__main__":
    sys.exit(main())
