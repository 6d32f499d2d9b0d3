"""The visible outputs of a report."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from vidspec_service.bench.common.report import Report


def text_of(report: Report) -> str:
    """The text that the report prints."""
    console = Console(file=io.StringIO(), width=160, record=True)
    report.show(console)
    return console.export_text()


def draws(report: Report, folder: Path, *names: str) -> bool:
    """Whether the report writes these plots as PNG files that show something: an empty one has fewer bytes."""
    paths = {name: folder / f"{name}.png" for name in names}
    report.write(paths)
    written = [path.read_bytes() for path in paths.values()]
    return all(picture.startswith(b"\x89PNG") and len(picture) > 10_000 for picture in written)
