"""The values that a bench's flags accept, and what is refused before anything is measured."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from vidspec_service.cli.parsing import UsageError, parse
from vidspec_service.errors import ConfigError


def ran(argv: Sequence[str]) -> int:
    command, args = parse(argv)
    return command.run(args)


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


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("check --seed=-1", "--seed: must be 0 or more, not -1"),
        ("bench speed --seed=-1", "--seed: must be 0 or more, not -1"),
        ("bench speed --prompts 0", "bench speed: .*must be 1 or more"),
        ("bench speed --modes fast", "bench speed: .*invalid choice: 'fast'"),
        ("bench speed --promts 3", "bench speed: .*--promts"),
        ("bench speed --concurrency many", "bench speed: .*many"),
        ("bench speed --timeline t.png --modes off", "does not include it"),
        ("bench speed --shape tiny", "need --random-weights"),
        ("bench speed --alpha 0.5", "need --random-weights"),
        ("bench speed --random-weights --alpha 1.5", "from 0 to 1"),
        ("bench speed --random-weights --temperature 1", "greedily"),
        ("bench speed --random-weights --modes parallel", "needs mode off"),
        ("bench speed --random-weights --model some/checkpoint", "leave out --model"),
        ("bench pruning --clips 0", "--clips: must be 1 or more, not 0"),
        ("bench pruning --ratios 1", r"from 0 to 0\.99"),
        ("bench pruning --engine --tasks motion", "--engine measures captions, but --tasks does not include them"),
        ("bench compression --ratios 1", "at most 0.99, not 1"),
        ("bench compression --ratios 0", "above 0 .*, not 0"),
        ("bench compression --methods none", "bench compression: .*invalid choice: 'none'"),
        ("bench compression --frames 0", "must be 1 or more"),
        ("bench compression --clips none", "bench compression: .*none"),
        ("bench compression --compression dycoke", "with and without"),
        ("bench pruning --seed -1", "--seed: must be 0 or more"),
        ("bench decode --frames 0", "must be 1 or more"),
        ("bench decode --repeats 0", "must be 1 or more"),
        ("bench decode --seconds 0", "--seconds must be above 0, or 0 with --clip"),
        ("bench decode --clip /no/such.mp4", "is not a file"),
        ("bench first-token --seconds -1", "--seconds: must be 0 or more"),
        ("bench structured --temperature -1", "--temperature: must be 0 or more"),
        (
            "bench cluster --engines-simulated 5 --callers 80",
            "must be more than the requests that the engines answer at once: 80",
        ),
        ("bench serve --rate 1 --soak 5", "--rate and --soak cannot go together"),
        ("bench serve --soak 5 --url http://localhost", "leave out --url"),
        ("bench serve --url http://localhost --speculation off", "leave out --speculation"),
        ("bench serve --warm-up 5", "--warm-up needs --soak"),
        ("bench serve --rate 2 --duration-s 60", "--duration-s needs --overload; other loads end with --requests"),
        ("bench serve --rate 2 --concurrency 8", "--rate .* leave out --concurrency"),
        ("bench serve --concurrency 0", "1 or more"),
        ("bench serve --overload -1", "above 0"),
        *(
            (f"bench serve {flags}", "is fixed for a server that a benchmark starts")
            for flags in ("--port 80", "--host ::", "--upload-dir up", "--log-level warning", "--no-access-log")
        ),
        ("bench first-token --log-format text", "is fixed for a server that a benchmark starts"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(argv: str, why: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=why):
        ran(argv.split())


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("bench decode --json no/such/folder/out", "is not a folder"),
        ("bench decode --plot no/such/folder/out.png", "is not a folder"),
        ("bench decode --json FOLDER", "it is a folder"),
        ("bench decode --plot FOLDER/plot.txt", "name must end in one of .*png"),
        ("bench speed --timeline FOLDER/lanes.mp4", "name must end in one of .*png"),
        ("eval-bundled --json FOLDER", "it is a folder"),
        ("eval-bundled --json no/such/folder/out.json", "is not a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_measuring(argv: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        parse(argv.replace("FOLDER", str(tmp_path)).split())


@pytest.mark.parametrize("argv", ["decode --json", "decode --plot"])
@pytest.mark.parametrize("allowed", [os.X_OK, os.W_OK])
def test_where_nothing_may_be_written_is_refused_before_measuring(
    argv: str, allowed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.access", lambda _, mode: mode == allowed)  # root may write anywhere
    with pytest.raises(UsageError, match=r"cannot write .*: permission denied"):
        parse(["bench", *argv.split(), str(tmp_path / "out.png")])


@pytest.mark.parametrize("name", ["plot", "plot.PNG", "plot.svg"])
def test_every_kind_of_picture_may_be_written(name: str, tmp_path: Path) -> None:
    assert parse(["bench", "decode", "--plot", str(tmp_path / name)])[1].plot == tmp_path / name


def test_plots_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vidspec_service.arguments.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'vidspec\[bench\]'"):
        parse(["bench", "decode", "--plot", str(tmp_path / "plot.png")])
