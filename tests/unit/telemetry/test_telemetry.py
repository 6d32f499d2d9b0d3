"""Log lines and metrics, without a server."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from vidspec_service.api.errors import TooManyRequests
from vidspec_service.engine.types import FinishReason
from vidspec_service.errors import Draining, QueueFull
from vidspec_service.telemetry import Metrics, configure_logging, request_id_var


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    level = logging.root.level
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    logging.root.setLevel(level)


def test_a_json_line_has_the_event_the_request_and_the_events_own_fields() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    token = request_id_var.set("r-1")
    facts = {"num_frames": 8, "codec": "h264"}
    logging.getLogger("vidspec").info("decoded", extra={**facts, "_note": 1, "color_message": "\x1b[1mdecoded"})
    logging.getLogger("vidspec").debug("not shown")
    request_id_var.reset(token)
    entry = json.loads(stream.getvalue())
    assert entry.pop("time").endswith("+00:00")
    assert entry == {"level": "info", "logger": "vidspec", "event": "decoded", "request_id": "r-1", **facts}


@pytest.mark.parametrize("kind", ["json", "text"])
def test_a_traceback_stays_in_its_json_line_and_follows_a_line_of_text(kind: str) -> None:
    stream = io.StringIO()
    configure_logging("info", kind, stream)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("vidspec").exception("failed")
    first, *more = stream.getvalue().splitlines()
    assert "failed" in first
    if kind == "json":
        assert not more
        assert "ValueError: why" in json.loads(first)["exception"]
    else:
        assert more[-1] == "ValueError: why"


def test_what_ends_a_process_is_a_json_line_too() -> None:
    program = """
from vidspec_service.telemetry import configure_logging
configure_logging("info", "json")
raise RuntimeError("why")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    entry = json.loads(ended.stderr)
    assert (ended.returncode, entry["level"], entry["event"]) == (1, "critical", "uncaught error")
    assert "RuntimeError: why" in entry["exception"]


def test_a_librarys_warning_is_a_json_line_too() -> None:
    program = """
import warnings
from vidspec_service.telemetry import configure_logging
configure_logging("info", "json")
warnings.warn("the driver is old")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    entry = json.loads(ended.stderr)
    assert (entry["level"], entry["logger"]) == ("warning", "py.warnings")
    assert "the driver is old" in entry["event"]


def test_a_library_with_a_handler_of_its_own_logs_once(capsys: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub import logging as of_the_hub

    logger, stream = of_the_hub.get_logger("huggingface_hub.some"), io.StringIO()
    configure_logging("info", "json", stream)
    logger.warning("retrying")
    assert json.loads(stream.getvalue())["event"] == "retrying"
    assert capsys.readouterr().err == ""


def test_a_compilers_own_steps_and_every_chunk_of_a_client_are_no_events_of_ours() -> None:
    """They are tens of thousands of lines at a first start with the level `debug`."""
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    for name in ("asyncio", "httpcore.http11", "httpx", "numba.core.ssa", "python_multipart.multipart"):
        logging.getLogger(name).warning("on stmt: a = 1")
    logging.getLogger("vidspec").debug("shown")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["shown"]


@pytest.mark.parametrize("kind", ["json", "text"])
def test_no_field_can_forge_a_line_or_send_escape_sequences_to_a_terminal(kind: str) -> None:
    stream = io.StringIO()
    configure_logging("info", kind, stream)
    forged = "/a\n2026 ERROR forged\x85\u2028\x9b2J"
    logging.getLogger("vidspec").info("answered", extra={"path": forged, "error": OSError(forged)})
    (line,) = stream.getvalue().splitlines()
    assert line.count('"/a\\n2026 ERROR forged\\u0085\\u2028\\u009b2J"') == 2
    assert "request_id" in line


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition("fake-target").decode())
    return {
        sample.name
        + "".join(f"|{value}" for name, value in sample.labels.items() if name != "model_name"): sample.value
        for family in families
        for sample in family.samples
    }


def test_workers_are_told_apart_by_role() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.forward["draft"].observe(0.001)
    metrics.forward["target"].observe(0.01)
    metrics.worker_idle_ratio.labels("draft").set(0.25)
    metrics.worker_restarts.labels("draft").inc()
    metrics.build.info({"version": "1.2.3"})
    found = samples(metrics)
    assert found["vidspec:draft_forward_seconds_count"] == 1
    assert found["vidspec:target_forward_seconds_sum"] == 0.01
    assert found["vidspec:worker_idle_ratio|draft"] == 0.25
    assert found["vidspec:worker_restarts_total|draft"] == 1
    assert found["vidspec:build_info|1.2.3"] == 1


def test_what_alerts_count_is_there_before_it_first_happens() -> None:
    """Prometheus sees no increase in a series that begins at 1."""
    found = samples(Metrics(CollectorRegistry()))
    for role in ("draft", "target"):
        assert found[f"vidspec:worker_restarts_total|{role}"] == 0
    for reason in (*FinishReason, "abort", "error"):
        assert found[f"vidspec:request_success_total|{reason}"] == 0
    for error in (QueueFull, Draining, TooManyRequests):
        assert found[f"vidspec:admission_rejections_total|{error.code}"] == 0


def test_an_hours_frames_and_a_large_models_chunk_on_a_cpu_have_buckets() -> None:
    """A quantile cannot be above the last bound."""
    metrics = Metrics(CollectorRegistry())
    metrics.video_frames_sampled.observe(3600)
    metrics.forward["target"].observe(45)
    found = samples(metrics)
    assert found["vidspec:video_frames_sampled_bucket|4096.0"] == 1
    assert found["vidspec:target_forward_seconds_bucket|60.0"] == 1


def test_two_sets_of_metrics_do_not_meet() -> None:
    first, second = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    first.generation_tokens.inc(3)
    assert samples(second)["vidspec:generation_tokens_total"] == 0
