"""Report, tables, plot and flags of `bench serve`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.bench.reports import draws, text_of
from vidspec_service.bench.common.report import Report, Row
from vidspec_service.bench.serve.load import RequestOutcome
from vidspec_service.bench.serve.report import Objectives, load_result, serve_report
from vidspec_service.bench.serve.run import ServeOptions
from vidspec_service.cli.bench import serve_options, server_flags
from vidspec_service.cli.parsing import parse
from vidspec_service.settings import Settings


def held(mib: int, files: int = 0) -> Row:
    return {"resident_bytes": mib << 20, "num_processes": 5, "num_descriptors": 40, "num_files": files}


def report(after: Row, *more: RequestOutcome) -> Report:
    outcomes = (
        RequestOutcome(due_s=0.1, status=200, ttft_s=0.5, e2e_s=1.0, num_tokens=6, is_complete=True),
        RequestOutcome(due_s=0.2, status=503, code="queue_full", e2e_s=0.01),
        *more,
    )
    load = load_result("soak", outcomes, 2.0, Objectives(ttft_s=1, tpot_s=1, deadline_s=5), is_open=False)
    before = held(1000)
    soak = {
        "num_requests": 2,
        "num_warm_up": 1,
        "before": before,
        "after": after,
        "samples": [(0, before), (2, after)],
        "growth": after["resident_bytes"] / before["resident_bytes"] - 1,
    }
    served = {"model": "m", "server": "its own", "settings": {"max_tokens": 5}}
    return serve_report([load], {"soak": outcomes}, soak, served)


def test_tables_and_file_say_the_same() -> None:
    made = report(held(1020))
    text = text_of(made)
    assert "+2.00 %" in text
    assert "offered" not in text
    assert "answered 1 (0 after the deadline), refused 1, left early 0, lost 0" in text
    assert "1 x 503 queue_full" in text
    written = json.loads(made.to_json())
    assert written["soak"]["growth"] == pytest.approx(0.02)
    assert written["loads"][0]["ttft"]["p50"] == 0.5
    assert len(written["outcomes"]["soak"]) == 2


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    assert draws(report(held(1000)), tmp_path, "plot")


def test_a_plot_is_drawn_without_a_warning_though_every_request_was_lost(tmp_path: Path) -> None:
    lost = [RequestOutcome(due_s=0.1, code="ConnectError")]
    load = load_result("closed", lost, 2.0, Objectives(), is_open=False)
    served = {"model": "m", "server": "its own", "settings": {}}
    assert draws(serve_report([load], {"closed": lost}, None, served), tmp_path, "plot")


def test_files_or_processes_that_stay_and_requests_that_were_lost_are_a_failure() -> None:
    assert report(held(1000)).failure is None
    found = report(held(1000, files=1)), report(held(1000) | {"num_processes": 6})
    lost = report(held(1000), RequestOutcome(due_s=0.3, code="ConnectError"))
    assert all("see above" in (each.failure or "") for each in (*found, lost))


def options(*flags: str) -> ServeOptions:
    return serve_options(parse(["bench", "serve", *flags])[1], Settings(request_timeout_s=30))


def test_flags_become_options() -> None:
    assert options() == ServeOptions(deadline_s=30)
    of_a_client = ["--url", "http://localhost", "--api-key-file", "key", "--request-timeout-s", "5"]
    assert options(*of_a_client) == ServeOptions(url="http://localhost", deadline_s=30)
    assert options("--rate", "2.5", "--requests", "9", "--repeat-files") == ServeOptions(
        rate=2.5, num_requests=9, has_repeated_files=True, deadline_s=30
    )


def test_settings_go_on_to_the_server() -> None:
    flags = ["--served-model-name", "a", "b", "--max-queued-requests", "2", "--no-metrics", "--config", "c.yaml"]
    found = server_flags(parse(["bench", "serve", *flags])[1])
    given, served = (vars(parse(["serve", *each])[1]) for each in (flags, found))
    assert given == served
