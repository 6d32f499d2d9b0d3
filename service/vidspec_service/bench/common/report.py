"""Report: the common form of every benchmark's results. Only this module prints tables, writes JSON and saves plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from vidspec_service.bench.common.environment import Placement, Provenance, hardware

_QUIET_LOAD = 0.3  # per core
_LEAST_WIDTH = 148  # even in a narrower terminal, which wraps the lines but loses nothing
_SIGNATURE_WIDTH = 180
_STYLE = {"font.size": 8, "axes.titlesize": 9, "axes.titlelocation": "left"}
_DASH = "-"

# Called to report progress: what is being done, parts done, total parts (0: unknown).
OnProgress = Callable[[str, int, int], None]
Row = dict[str, Any]  # one line of results under its JSON keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot: its size in inches, and the function that draws it into a matplotlib figure."""

    size: tuple[float, float]
    draw: Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of one run, and everything that they depend on."""

    bench: str
    baseline: str
    facts: Mapping[str, str]  # models and other fixed conditions, by label
    figures: Mapping[str, Any]  # written to the JSON file as they are
    body: Sequence[RenderableType]  # tables and lines
    plots: Mapping[str, Plot] = field(default_factory=dict)  # by the flag that names their file
    placements: Sequence[Placement] = ()  # of the models that may be on an accelerator
    libraries: Mapping[str, str] = field(default_factory=dict)  # other libraries that were measured: name to version
    failure: str | None = None  # a result that counts as a failure: the command exits with code 1
    provenance: Provenance = field(default_factory=Provenance)  # recorded before the run and added by the command

    @property
    def versions(self) -> dict[str, str]:
        return {**self.provenance.versions, **self.libraries}

    @property
    def hardware(self) -> Row:
        return hardware(*self.placements)

    def to_json(self) -> str:
        """The content of the JSON file; null for values that are not finite."""
        content = {
            "bench": self.bench,
            "created": self.provenance.created,
            "command": self.provenance.command,
            "baseline": self.baseline,
            "hardware": self.hardware,
            "versions": self.versions,
            "load_average_before": self.provenance.load_average,
            **self.figures,
        }
        return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"

    def renderables(self) -> Iterator[RenderableType]:
        """Facts first, then the tables, then a warning if the machine was busy."""
        machine, load = self.hardware, self.provenance.load_average
        yield "hardware  {cpu}, {cores} cores, {memory_gib} GiB; ".format(**machine) + " ".join(machine["flags"])
        for device, name in machine["accelerators"].items():
            yield f"          {device} {name}"
        labelled = {
            "versions": _listed(self.versions),
            **self.facts,
            "load": f"{load:.2f} before the run",
            "baseline": self.baseline,
            "command": self.provenance.command,
        }
        for label, text in labelled.items():
            yield f"{label:<9} {text}"
        yield from self.body
        if load > _QUIET_LOAD * machine["cores"]:
            yield (
                f"WARNING: load average {load:.2f} on {machine['cores']} cores before the run: "
                "other processes were running; do not trust these timings"
            )

    def show(self, console: Console | None = None) -> None:
        """Print to stdout, wide enough to keep tables whole."""
        if console is None:
            width, height = Console().size  # without a height, rich takes a dumb terminal for 80 columns wide
            console = Console(highlight=False, width=max(width, _LEAST_WIDTH), height=height, soft_wrap=True)
        for renderable in self.renderables():
            console.print(renderable, markup=False)

    def write(self, paths: Mapping[str, Path | None]) -> None:
        """Write the JSON file and the plots for which `paths` has a path."""
        if (path := paths.get("json")) is not None:
            path.write_text(self.to_json(), encoding="utf-8")
        for name, plot in self.plots.items():
            if (path := paths.get(name)) is not None:
                self._draw(plot, path)

    def _draw(self, plot: Plot, path: Path) -> None:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        signature = (
            "; ".join(["{cpu}, {cores} cores".format(**self.hardware), *map(" ".join, self.facts.items())]),
            f"{_listed(self.versions)}; baseline: {self.baseline}",
            self.provenance.command,
        )
        lines = [line for text in signature for line in wrap(text, _SIGNATURE_WIDTH)]
        with rc_context(_STYLE):
            figure = Figure(figsize=plot.size, dpi=150, layout="constrained")
            plot.draw(figure)
            figure.supxlabel("\n".join(lines), fontsize=6, x=0.01, ha="left", parse_math=False)
            figure.savefig(path)


def as_text(given: str) -> str:
    """A path or an argument in a report: of one that is no text, the other bytes are shown as escapes."""
    return given.encode(errors="backslashreplace").decode()


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def table(title: str, columns: Mapping[str, Callable[[Any], str]], rows: Iterable[object]) -> Table:
    """A table. `columns` maps each title to a function that gives a row's cell; the first column names the row."""
    made = Table(title=escape(title), title_justify="left")  # names of files have brackets, too
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(show(row) for show in columns.values()))
    return made


def format_value(value: float | None, form: str, scale: float = 1, interval: tuple[float, float] | None = None) -> str:
    """The scaled value in a format, followed by its interval if there is one; a dash for None."""
    text = _DASH if value is None else form.format(value * scale)
    return text if interval is None else f"{text} ({format_interval(interval, form, scale)})"


def format_interval(interval: tuple[float, float] | None, form: str, scale: float = 1) -> str:
    """Both ends of an interval in a format; a dash for None."""
    return _DASH if interval is None else "..".join(form.format(end * scale) for end in interval)


def column(key: str, form: str = "{}", scale: float = 1, *, with_interval: bool = False) -> Callable[[Row], str]:
    """A column that shows one entry of a row of results; with its interval, which is the entry `{key}_interval`."""

    def cell(row: Row) -> str:
        value = row[key]
        if isinstance(value, str):
            return value
        return format_value(value, form, scale, row[f"{key}_interval"] if with_interval else None)

    return cell
