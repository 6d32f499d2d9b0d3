"""What a flag of a bench takes, and what is refused before anything is measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from vidspec_service.cli.parsing import UsageError, parse

NUMBERS = {
    "--rate": ("bench serve", 0.0, False),
    "--seconds": ("bench decode", 0.0, True),
    "--temperature": ("bench speed", 0.0, True),
}


@pytest.mark.parametrize("flag", NUMBERS)
@pytest.mark.parametrize("value", [-1.0, -math.inf, math.inf, math.nan, 0.0])
def test_a_number_out_of_bounds_is_refused(flag: str, value: float) -> None:
    command, least, takes_least = NUMBERS[flag]
    argv = [*command.split(), f"{flag}={value}"]
    if value == least and takes_least:
        parse(argv)
    else:
        with pytest.raises(UsageError, match=f"{flag}: must be (above 0|0 or more), not {value:g}"):
            parse(argv)


@pytest.mark.parametrize("command", ["bench speed", "bench structured", "check"])
def test_there_are_no_seeds_below_zero(command: str) -> None:
    with pytest.raises(UsageError, match="--seed: must be 0 or more, not -1"):
        parse([*command.split(), "--seed=-1"])


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("bench decode --json no/such/folder/out", "is not a folder"),
        ("bench decode --plot no/such/folder/out.png", "is not a folder"),
        ("bench decode --json FOLDER", "it is a folder"),
        ("bench decode --plot FOLDER/plot.txt", "a picture is one of .*png"),
        ("bench speed --timeline FOLDER/lanes.mp4", "a picture is one of .*png"),
        ("bench pruning --overlay FOLDER/file", "it is a file"),
        ("bench pruning --overlay no/such/folder/out", "is not a folder"),
        ("eval-bundled --json FOLDER", "it is a folder"),
        ("eval-bundled --json no/such/folder/out.json", "is not a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_measuring(argv: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=why):
        parse(argv.replace("FOLDER", str(tmp_path)).split())


@pytest.mark.parametrize("name", ["plot", "plot.PNG", "plot.svg"])
def test_every_kind_of_picture_may_be_written(name: str, tmp_path: Path) -> None:
    assert parse(["bench", "decode", "--plot", str(tmp_path / name)])[1].plot == tmp_path / name


def test_plots_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vidspec_service.bench.common.options.find_spec", lambda _: None)
    for argv in (["decode", "--plot"], ["pruning", "--overlay"]):
        with pytest.raises(UsageError, match=r"pip install 'vidspec\[bench\]'"):
            parse(["bench", *argv, str(tmp_path / "plot.png")])
