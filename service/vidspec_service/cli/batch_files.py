"""The lines of `vidspec batch`: requests as in OpenAI's batch files, results from which a killed run continues."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vidspec_service.cli.terminal import printable_json

OWN_ROUTE = "/v1/video-chat"
ROUTES = (OWN_ROUTE, "/v1/chat/completions", "/v1/completions", "/v1/responses")
STREAMED = "stream must be false: an answer is one line"
_OK = 200
_NOT_IN_TIME = 504
_BEGIN = b'{"custom_id": '  # of a line of results
_FIELDS = {"custom_id", "method", "url", "body"}


class BatchFileError(Exception):
    """A line that states no request; says which and why."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file, one after the other; raises BatchFileError, OSError."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = _parse_request(json.loads(text))
                if line.custom_id in seen:
                    raise ValueError(f"custom_id {line.custom_id!r} is already used by an earlier line")
            except (ValueError, RecursionError) as error:
                raise BatchFileError(f"{path}, line {number}: {error}") from error
            seen.add(line.custom_id)
            yield line


def _parse_request(given: object) -> BatchRequest:
    if not isinstance(given, dict):
        raise ValueError("not a JSON object")
    if unknown := given.keys() - _FIELDS:
        raise ValueError(f"unknown field {min(unknown)!r}; a line has {', '.join(sorted(_FIELDS))}")
    custom_id, url, body = given.get("custom_id"), given.get("url", OWN_ROUTE), given.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a non-empty string that no other line has")
    if given.get("method", "POST") != "POST":
        raise ValueError("method must be POST")
    if url not in ROUTES:
        raise ValueError(f"url must be one of {', '.join(ROUTES)}")
    if not isinstance(body, dict):
        raise ValueError("body must be an object with the fields of the request")
    if body.get("stream"):
        raise ValueError(STREAMED)
    return BatchRequest(custom_id, url, body)


def requests_for_videos(paths: Iterable[Path], body: Mapping[str, Any]) -> Iterator[BatchRequest]:
    """The same request about each of the files, whose paths are the ids."""
    for path in paths:
        yield BatchRequest(str(path), OWN_ROUTE, {**body, "video": str(path)})


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a request, with the fields of a line of results."""

    custom_id: str
    response: Mapping[str, Any] | None
    error: Mapping[str, str] | None

    @property
    def is_success(self) -> bool:
        """Whether the server was asked and answered with status 200."""
        return self.response is not None and self.response["status_code"] == _OK

    def to_dict(self) -> dict[str, Any]:
        """For a file. `asdict` would copy the response value by value, and fail on one that is nested deeply."""
        return {"custom_id": self.custom_id, "response": self.response, "error": self.error}


OnResult = Callable[[BatchResult], None]


class ResultsFile:
    """The file of answers, a line each. `answered` tells of those of earlier runs whether each is good."""

    def __init__(self, file: BinaryIO, answered: dict[str, bool]) -> None:
        self._file = file
        self.answered = answered

    def add(self, answer: BatchResult) -> None:
        """Write an answer; from then on it survives the end of this process."""
        # Escaped are, for one, line ends that Python's `splitlines` knows, and bytes of a file name that is not UTF-8.
        self._file.write(printable_json(answer.to_dict(), indent=None).encode() + b"\n")
        self._file.flush()


@contextmanager
def open_results(path: Path) -> Iterator[ResultsFile]:
    """Open the file to add answers. Lines cut short by a kill, or without an answer, are dropped and asked again.

    Raises BatchFileError if the file has anything but results, or another run writes to it; OSError.
    """
    with path.open("a+b") as file:
        _lock(file, path)
        answered: dict[str, bool] = {}
        is_whole = True
        for _, result in _read_results(file, path):
            if result is None:
                is_whole = False
            else:
                answered[result.custom_id] = result.is_success
        if is_whole:
            yield ResultsFile(file, answered)
            return
        real = path.resolve()  # a link stays one
        kept = real.with_name(f"{real.name}.kept")
        try:
            with kept.open("wb") as whole:
                _lock(whole, path)  # before it takes the place of the file
                os.fchmod(whole.fileno(), os.fstat(file.fileno()).st_mode & 0o777)
                whole.writelines(text for text, result in _read_results(file, path) if result is not None)
                whole.flush()
                os.replace(kept, real)
                yield ResultsFile(whole, answered)
        finally:
            kept.unlink(missing_ok=True)


def _read_results(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, BatchResult | None]]:
    """Every line and its result: None if it is cut or has no answer, for want of time too. Raises BatchFileError."""
    file.seek(0)
    for number, text in enumerate(file, 1):
        yield text, _parse_result(text, f"{path}, line {number}")


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchFileError(f"{path}: another vidspec batch is writing to it") from None


def _parse_result(text: bytes, where: str) -> BatchResult | None:
    is_cut = not text.endswith(b"\n")
    result: Any = None
    with suppress(ValueError, RecursionError):
        result = json.loads(text)
    match result:
        case None if is_cut and _BEGIN.startswith(text[: len(_BEGIN)].rstrip(b"\0")):
            return None  # zeros: what a loss of power may leave
        case {"custom_id": str(), "response": response} if is_cut or response is None:
            return None
        case {"custom_id": str(name), "response": {"status_code": int(status)} as response}:
            # Whoever repeats the command may have given the server more time.
            return None if status == _NOT_IN_TIME else BatchResult(name, response, None)
    raise BatchFileError(f"{where}: not a result of vidspec batch; choose another output file")
