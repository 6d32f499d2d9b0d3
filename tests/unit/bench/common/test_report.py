"""The common report: names in text, file and picture, and what is refused before anything is measured."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.bench.reports import text_of
from vidspec_service.bench.common import environment
from vidspec_service.bench.common.environment import Placement, Provenance, cpu_fields
from vidspec_service.bench.common.report import Plot, Report, column, format_interval, format_value, table

PROVENANCE = Provenance(command="vidspec bench $some^^$", created="now", versions={"vidspec": "0"}, load_average=0.0)
REPORT = Report(
    bench="some",
    baseline="none",
    provenance=PROVENANCE,
    placements=[Placement(device="cuda:0", dtype="bfloat16", device_name="Some GPU")],
    facts={"server": "its own"},
    figures={"answer": 42},
    body=["a line"],
    plots={"plot": Plot(size=(4, 3), draw=lambda figure: figure.add_subplot())},
)


def test_a_dumb_terminal_gets_whole_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Emacs, for one: rich takes it for 80 columns wide, and cut the figures to fit."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    columns = {f"column {number}": column("figure", "{:.1f}") for number in range(9)}
    replace(REPORT, body=[table("Figures", columns, [{"figure": 123456.7}])]).show()
    assert capsys.readouterr().out.count("123456.7") == len(columns)


def test_text_and_file_name_hardware_versions_command_and_baseline() -> None:
    found = json.loads(REPORT.to_json())
    assert found["hardware"]["accelerators"] == {"cuda:0": "Some GPU"}
    assert (found["bench"], found["created"], found["load_average_before"]) == ("some", "now", 0.0)
    assert (found["baseline"], found["command"], found["versions"]) == (
        "none",
        "vidspec bench $some^^$",
        {"vidspec": "0"},
    )
    assert found["answer"] == 42
    text = text_of(REPORT)
    for line in (
        f"hardware  {REPORT.hardware['cpu']}",
        "          cuda:0 Some GPU",
        "versions  vidspec 0",
        "server    its own",
        "load      0.00 before the run",
        "baseline  none",
        "command   vidspec bench $some^^$",
        "a line",
    ):
        assert line in text


def test_a_busy_machine_is_warned_about() -> None:
    assert "WARNING" not in text_of(REPORT)
    busy = replace(REPORT, provenance=replace(PROVENANCE, load_average=99.0))
    assert "WARNING: load average 99.00" in text_of(busy)


def test_files_are_written_where_there_is_a_path(tmp_path: Path) -> None:
    REPORT.write({"json": tmp_path / "r.json", "plot": tmp_path / "p.png", "timeline": tmp_path / "t.png"})
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(REPORT.to_json())
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "t.png").exists()


def test_a_table_has_names_as_they_are_and_a_dash_for_what_is_not_there() -> None:
    columns = {"name": column("name"), "ms": column("seconds", "{:.1f}", 1000)}
    rows = [{"name": "a [hd].mp4", "seconds": 0.0125}, {"name": "b", "seconds": None}]
    text = text_of(replace(REPORT, body=[table("All [hd].mp4", columns, rows)]))
    for shown in ("All [hd].mp4", "a [hd].mp4", "12.5"):
        assert shown in text
    assert format_value(None, "{:.1f}") == "-"


def test_what_is_not_finite_is_null_in_the_file() -> None:
    odd = replace(REPORT, figures={"ratios": [float("nan"), float("inf")], "by_rows": {1: -float("inf")}})
    found = json.loads(odd.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (found["ratios"], found["by_rows"]) == ([None, None], {"1": None})


def test_a_figure_is_followed_by_its_interval_if_it_has_one() -> None:
    assert format_value(1.5, "{:.1f}x", interval=(1.0, 2.0)) == "1.5x (1.0x..2.0x)"
    assert format_value(1.5, "{:.1f}x") == "1.5x"
    assert (format_value(None, "{:.1f}x"), format_interval(None, "{:.1f}")) == ("-", "-")


def test_the_processor_is_read_from_its_first_entry() -> None:
    text = "processor\t: 0\nmodel name\t: One\nflags\t\t: avx2 amx_tile\n\nprocessor\t: 1\nmodel name\t: Two\n"
    assert cpu_fields(text)["model name"] == "One"
    assert cpu_fields(text)["flags"].split() == ["avx2", "amx_tile"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_this_code_and_not_of_a_project_that_it_is_installed_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*words: str) -> None:
        named = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", "-C", str(tmp_path), *named, *words], check=True, capture_output=True)

    installed = tmp_path / "environment.py"
    installed.touch()
    monkeypatch.setattr(environment, "__file__", str(installed))
    git("init")
    git("commit", "--allow-empty", "-m", "another project")
    assert "commit" not in environment.versions()
    git("add", "environment.py")
    git("commit", "-m", "this project")
    assert environment.versions()["commit"]
