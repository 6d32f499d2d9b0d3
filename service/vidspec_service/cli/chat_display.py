"""An answer in the terminal: a bar while the video is sent, a spinner, the text as it comes, a summary."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.spinner import Spinner

from vidspec_service.cli.parsing import UsageError
from vidspec_service.cli.terminal import note, printable, say


def print_chunks(chunks: Iterable[dict[str, Any]], progress: ChatProgress) -> str:
    """Print the answer's text and its summary; returns the text. Raises ChatFailed as `chunks` do."""
    final: dict[str, Any] = {}
    parts: list[str] = []
    try:
        for final in chunks:
            thinks = any("reasoning" in choice["delta"] for choice in final["choices"])
            progress.phase = "thinking" if thinks else "prefilling"
            text = "".join(choice["delta"].get("content", "") for choice in final["choices"])
            if text:
                progress.stop()
                parts.append(text)
                sys.stdout.write(printable(text))
                sys.stdout.flush()
    finally:
        progress.stop()
        if parts:
            say("")
    for line in summary_lines(final):
        note(printable(line))
    return "".join(parts)


class ChatProgress(Progress):
    """A bar while the one file opened with it is sent, then a spinner with `phase`; on a terminal's stderr only."""

    def __init__(self) -> None:
        self.phase = "decoding the video"
        self._spinner = Spinner("dots")
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def sending(self, path: Path) -> BinaryIO:
        """The opened file; raises UsageError."""
        try:
            return self.open(path, "rb", description=f"sending {path.name}")
        except OSError as error:
            raise UsageError(f"vidspec chat: cannot read {path}: {error.strerror}") from error

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by rich for every refresh."""
        if all(task.finished for task in self.tasks):
            self._spinner.update(text=self.phase)
            yield self._spinner
        else:
            yield self.make_tasks_table(self.tasks)


def summary_lines(final: dict[str, Any]) -> Iterator[str]:
    """What the last chunk tells about the answer, and every warning about the videos: `--field` may add some."""
    usage, videos = final["usage"], final["videos"]
    speculation, timings = final["speculation"], final["timings"]
    for video in videos:
        for warning in video["warnings"]:
            yield f"warning: {warning}"
    frames = " and ".join(f"{video['num_frames']} frames of {video['duration_s']:.1f} s" for video in videos)
    per_token_s = timings["time_per_output_token_s"]
    rate = f", {1 / per_token_s:.0f} tokens/s" if per_token_s > 0 else ""
    first = f"first after {timings['time_to_first_token_s']:.2f} s"
    waits = ", ".join(f"{name} {timings[f'{name}_s']:.2f}" for name in ("decode", "queue", "prefill"))
    num_thought = usage["completion_tokens_details"]["reasoning_tokens"]
    thought = f" ({num_thought} of them reasoning)" if num_thought else ""
    accepted = f", {speculation['acceptance_rate']:.0%} accepted" if speculation["mode"] != "off" else ""
    yield (
        f"{usage['completion_tokens']} tokens{thought}{rate}, {first} ({waits}); "
        f"speculation {speculation['mode']}{accepted}; {frames}"
    )
