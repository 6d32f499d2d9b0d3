"""What every bench does before and after it measures."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.bench.common.test_report import REPORT
from vidspec_service.bench.common.report import Report
from vidspec_service.cli.bench import BENCHES, pair_of
from vidspec_service.cli.parsing import parse
from vidspec_service.errors import ConfigError


def test_figures_are_in_their_file_though_nobody_reads_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_reads(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(BENCHES["decode"], "measure", lambda *_: REPORT)
    monkeypatch.setattr(Report, "show", nobody_reads)
    monkeypatch.setattr(sys, "argv", ["vidspec", "bench", "decode", "--json", "a file", "--clip", "caf\udce9"])
    args = parse(["bench", "decode", "--json", str(tmp_path / "r.json")])[1]
    with pytest.raises(BrokenPipeError):
        BENCHES["decode"].run(args)
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["answer"], found["command"]) == (42, r"vidspec bench decode --json 'a file' --clip 'caf\udce9'")


def test_the_table_is_printed_though_the_figures_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk_is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BENCHES["decode"], "measure", lambda *_: REPORT)
    monkeypatch.setattr(Report, "write", disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        BENCHES["decode"].run(parse(["bench", "decode"])[1])
    assert "hardware" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failure", "code", "said"), [(None, 0, ""), ("It broke", 1, "vidspec bench some: It broke\n")]
)
def test_what_must_not_come_out_is_said_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: str | None, code: int, said: str
) -> None:
    monkeypatch.setattr(BENCHES["decode"], "measure", lambda *_: replace(REPORT, failure=failure))
    assert BENCHES["decode"].run(parse(["bench", "decode"])[1]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("bench", "flag"),
    [
        ("speed", "--speculation off"),
        ("structured", "--compression v-cast"),
        ("cluster", "--max-upload-bytes 5"),
        ("compression", "--compression-ratio 0.5"),
        ("peers", "--target-dtype int4"),
        ("pruning", "--prune-ratio 0.5"),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused(bench: str, flag: str) -> None:
    _, args = parse(["bench", bench, *flag.split()])
    with pytest.raises(ConfigError, match=f"^{flag.split()[0]} changes nothing in this benchmark: leave it out"):
        BENCHES[bench].measure(args, lambda *_: None)


def test_workers_of_a_bench_log_warnings_only() -> None:
    assert pair_of(parse(["bench", "structured", "--log-level", "info"])[1]).log_level == "warning"
