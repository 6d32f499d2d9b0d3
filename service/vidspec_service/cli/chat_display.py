"""How `vidspec chat` looks: what is being waited for, the text without control characters, the closing summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.spinner import Spinner


class ChatProgress(Progress):
    """A bar while the one file opened with it is sent, then a spinner with `phase`; on a terminal's stderr only."""

    def __init__(self) -> None:
        self.phase = "decoding the video"
        self._spinner = Spinner("dots")
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by rich for every picture."""
        if all(task.finished for task in self.tasks):
            self._spinner.update(text=self.phase)
            yield self._spinner
        else:
            yield self.make_tasks_table(self.tasks)


def printable(text: str) -> str:
    """Without what a terminal would obey: a model may write any character, an escape sequence too."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")


def summary_lines(final: dict[str, Any]) -> Iterator[str]:
    """What the last chunk tells about the answer, and every warning about the video."""
    usage, video = final["usage"], final["video"]
    speculation, timings = final["speculation"], final["timings"]
    for warning in video["warnings"]:
        yield f"warning: {warning}"
    per_token_s = timings["time_per_output_token_s"]
    rate = f", {1 / per_token_s:.0f} tokens/s" if per_token_s > 0 else ""
    first = f"first after {timings['time_to_first_token_s']:.2f} s"
    waits = ", ".join(f"{name} {timings[f'{name}_s']:.2f}" for name in ("decode", "queue", "prefill"))
    accepted = f", {speculation['acceptance_rate']:.0%} accepted" if speculation["mode"] != "off" else ""
    yield (
        f"{usage['completion_tokens']} tokens{rate}, {first} ({waits}); "
        f"speculation {speculation['mode']}{accepted}; "
        f"{video['num_frames']} frames of {video['duration_s']:.1f} s"
    )
