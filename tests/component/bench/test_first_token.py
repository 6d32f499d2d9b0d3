"""The time to the first token of a real server on the bundled pair, in stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vidspec_service.cli.parsing import parse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_stage_of_new_files_is_told(tmp_path: Path) -> None:
    json_file, picture = tmp_path / "times.json", tmp_path / "lanes.png"
    flags = ["--seconds", "1", "--repeats", "1", "--concurrency", "2", "--json", str(json_file), "--plot", str(picture)]
    command, args = parse(["bench", "first-token", *flags])
    assert command.run(args) == 0
    rows = json.loads(json_file.read_text())["clips"]
    assert [row["at_once"] for row in rows] == [1, 2, 1, 2]
    for row in rows:
        stages = [row[f"{stage}_s"] for stage in ("decode", "tower", "prefill")]
        assert all(seconds > 0 for seconds in stages), "a file that the server knew"
        assert row["first_token_s"] > max(stages)
    assert picture.stat().st_size > 10_000
