"""`vidspec chat` without a question: the video is sent once, then questions are read and answered one after the other.

A question that got no whole answer, because it was stopped or failed, is forgotten.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from vidspec_service.cli.chat_client import ChatClient, ChatFailed
from vidspec_service.cli.chat_display import ChatProgress, print_chunks
from vidspec_service.cli.parsing import UsageError
from vidspec_service.cli.terminal import note, printable, say

with suppress(ImportError):  # not on Windows
    import readline  # noqa: F401 -- `input` edits lines and remembers them

_NOT_FOUND = 404
_ANY_QUESTION = [{"role": "user", "content": "?"}]


class Conversation:
    """With one server about one video, which the server keeps for a while."""

    def __init__(self, client: ChatClient, video: Path, fields: Mapping[str, object]) -> None:
        self._client = client
        self._video = video
        self._fields = dict(fields)
        self._said: list[dict[str, str]] = []
        self._id = ""

    def run(self) -> int:
        """Send the video, answer questions until there are no more; the exit code is 1 if the last one failed.

        Raises ChatFailed or UsageError if the video cannot be sent; UsageError if stdin has no question.
        """
        kept = self._send()
        facts = f"{kept['duration_s']:.1f} s, {kept['width']} x {kept['height']}, {kept['codec']}"
        note(f"{self._video.name}: {printable(facts)}")
        if sys.stdin.isatty():
            note("Ctrl-C stops an answer, Ctrl-D ends the conversation.")
            # Meanwhile the server reads the video, so that only the question itself is left to be read.
            Thread(target=self._read_ahead, daemon=True).start()
        code = None
        while (question := _next_question()) is not None:
            if question.strip():
                code = self._answer(question)
        if code is None and not sys.stdin.isatty():
            raise UsageError("vidspec chat: no question: give a PROMPT, or one a line on stdin")
        return code or 0

    def _answer(self, question: str) -> int:
        turns = [*self._said, {"role": "user", "content": question}]
        try:
            text = self._print_answer(turns)
        except KeyboardInterrupt:
            note("stopped")
            return 0
        except ChatFailed as error:
            note(f"vidspec chat: {printable(str(error))}")
            return 1
        if text.strip():
            self._said = [*turns, {"role": "assistant", "content": text}]
        return 0

    def _print_answer(self, turns: list[dict[str, str]]) -> str:
        try:
            return self._ask(turns)
        except ChatFailed as error:
            if error.status != _NOT_FOUND:
                raise
        self._send()  # the server has forgotten the video: it was started again, or nobody asked for an hour
        return self._ask(turns)

    def _ask(self, turns: list[dict[str, str]]) -> str:
        with ChatProgress() as progress:
            return print_chunks(
                self._client.stream(self._id, {**self._fields, "messages": json.dumps(turns)}), progress
            )

    def _send(self) -> dict[str, Any]:
        progress = ChatProgress()
        progress.phase = "waiting for the server"
        with progress.sending(self._video) as video, progress:
            kept = self._client.keep(video)
        self._id = kept["id"]
        return kept

    def _read_ahead(self) -> None:
        with suppress(ChatFailed):  # the answer to the question itself says what is wrong
            self._client.ask(self._id, {**self._fields, "messages": json.dumps(_ANY_QUESTION), "max_tokens": 1})


def _next_question() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        say("")  # it was meant for an answer that had just ended, or for a line typed wrong: the conversation goes on
        return ""
    except UnicodeDecodeError as error:
        raise UsageError(f"vidspec chat: the question is not valid text ({error})") from error
