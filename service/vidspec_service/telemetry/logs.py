"""Structured logging and the request id that marks every line.

An event is a constant string with its facts in `extra`; prompts, answers and frames never go into one.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

request_id_var: ContextVar[str] = ContextVar("request_id", default="-")

_log = logging.getLogger(__name__)

_PLAIN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
# They log every chunk and every step of a compiler, and warn about faults of clients.
_QUIET_LIBRARIES = ("asyncio", "httpcore", "httpx", "numba", "python_multipart")


def configure_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send every logger's events from `level` up to `stream` (stderr), as "json" or "text"."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    sys.excepthook = _log_uncaught if log_format == "json" else sys.__excepthook__
    logging.captureWarnings(log_format == "json")  # Python's own report of a warning has two lines
    logging.getLogger("huggingface_hub").handlers.clear()  # its own handler would log every retry a second time
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own report has many lines, none of which is JSON."""
    _log.critical("uncaught error", exc_info=(kind, error, trace))


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, event, request id, then the event's own fields."""
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            "request_id": request_id_var.get(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """One line for a person; a traceback follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The same fields as in JSON; strings are quoted, so that no field can forge a line."""
        fields = {"request_id": request_id_var.get(), **_fields(record)}
        tail = " ".join(f"{name}={json.dumps(value, default=str)}" for name, value in fields.items())
        line = f"{_time(record)} {record.levelname:<7} {record.getMessage()}  {tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The event's own fields. Names with a leading underscore are left out: libraries such as Ray use them."""
    found = vars(record).items()
    return {name: value for name, value in found if name not in _PLAIN_FIELDS and not name.startswith("_")}
