"""Traces: one for each sampled request, refused requests included; no request waits for its trace."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.api.test_include import SCRIPT, WORK
from tests.api.world import DATA_URL, URL, World
from tests.collector import Collector, attributes, collecting
from tests.fakes import FINISHED, PROMPT_READY, FakeEngine
from vidspec_models.request import Include
from vidspec_service import telemetry
from vidspec_service.api.errors import status_of
from vidspec_service.api.services import Remotes, open_remotes
from vidspec_service.engine.types import Phase
from vidspec_service.errors import CapacityError, ConfigError, GenerationFailed, VideoUnsupported
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Traces

pytestmark = [pytest.mark.api, pytest.mark.anyio]

TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


async def ask_as_part_of(world: World, traceparent: str, **fields: object) -> int:
    body = {"video": DATA_URL, "prompt": "What moves?", **fields}
    return (await world.client.post(URL, json=body, headers={"traceparent": traceparent})).status_code


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


async def test_a_request_is_a_span_of_its_callers_trace_and_its_steps_are_inside(
    tmp_path: Path, collector: Collector
) -> None:
    traces = Traces(collector.endpoint, "0.0")
    prepared = replace(WORK, phase=Phase.PREPARE)
    world = World(tmp_path, FakeEngine(PROMPT_READY, prepared, *SCRIPT[1:]), traces=traces)
    assert await ask_as_part_of(world, f"00-{TRACE_ID}-{CALLER_ID}-01", max_tokens=9) == 200
    traces.close()
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(each.finished.is_set() for each in timers), "the process would wait for it"
    spans = by_name(collector.spans)
    assert set(spans) == {f"POST {URL}", "admit", "decode", "submit", "prefill", "verify", "commit", "stream"}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    whole = spans.pop(f"POST {URL}")
    assert whole.parent_span_id.hex() == CALLER_ID
    assert whole.kind == Span.SPAN_KIND_SERVER
    assert {span.parent_span_id for span in spans.values()} == {whole.span_id}
    said = attributes(whole)
    assert said["gen_ai.response.model"] == "fake-target"
    assert (said["gen_ai.usage.prompt_tokens"], said["gen_ai.usage.completion_tokens"]) == (40, 5)
    assert (said["gen_ai.request.max_tokens"], said["vidspec.outcome"]) == (9, "stop")
    assert said["http.response.status_code"] == 200
    assert said["gen_ai.latency.time_in_model_prefill"] == FINISHED.prefill_s
    begun = [spans[name].start_time_unix_nano for name in ("admit", "decode", "submit", "commit")]
    assert begun == sorted(begun)
    assert spans["admit"].end_time_unix_nano == spans["decode"].start_time_unix_nano, "the queue is a part of it"
    assert [attributes(spans[name])["vidspec.worker"] for name in ("admit", "verify")] == ["api", "target"]
    assert attributes(spans["verify"])["vidspec.num_tokens"] == 4
    assert attributes(spans["commit"])["vidspec.num_tokens"] == 3
    assert attributes(spans["verify"])["vidspec.busy_s"] == WORK.end - WORK.start
    assert spans["verify"].end_time_unix_nano - spans["verify"].start_time_unix_nano == pytest.approx(1e9, rel=1e-6)
    assert collector.resource["service.name"] == "vidspec"


async def test_without_its_packages_what_to_install_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'vidspec\[otel\]'"):
        Traces("http://127.0.0.1:9", "0.0")


async def test_without_an_endpoint_nothing_is_sent_to_a_collector_on_this_machine() -> None:
    async with open_remotes(Settings()) as remotes:
        assert remotes == Remotes()


async def test_at_the_end_the_last_traces_are_sent(tmp_path: Path, collector: Collector) -> None:
    async with open_remotes(Settings(otlp_traces_endpoint=collector.endpoint)) as remotes:
        assert (await World(tmp_path, traces=remotes.traces).ask()).status_code == 200
    assert f"POST {URL}" in by_name(collector.spans)


async def test_the_operators_own_names_are_sent(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "captions")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    traces = Traces(collector.endpoint, "1.2")
    assert (await World(tmp_path, traces=traces).ask()).status_code == 200
    traces.close()
    expected = {"service.name": "captions", "service.version": "1.2", "deployment.environment": "test"}
    assert expected.items() <= collector.resource.items()


async def test_tracing_tells_the_client_nothing_that_was_not_asked_for(tmp_path: Path, collector: Collector) -> None:
    traces = Traces(collector.endpoint, "0.0")
    world = World(tmp_path, FakeEngine(*SCRIPT), traces=traces)
    answer = await world.ask()
    assert world.engine.requests[0].include == {Include.TIMELINE}
    assert "timeline" not in answer.json()
    assert len((await world.ask(include=["timeline"])).json()["timeline"]) == 1, "and nothing less"
    traces.close()


async def test_what_is_not_sampled_is_not_traced(tmp_path: Path, collector: Collector) -> None:
    traces = Traces(collector.endpoint, "0.0")
    world = World(tmp_path, traces=traces)
    assert await ask_as_part_of(world, f"00-{TRACE_ID}-{CALLER_ID}-00") == 200
    traces.close()
    assert collector.spans == []
    assert world.engine.requests[0].include == frozenset()


async def test_only_a_failure_of_the_server_is_traced_as_an_error(tmp_path: Path, collector: Collector) -> None:
    """OpenTelemetry's conventions: a server's span of a request that its client got wrong (4xx) is no error."""
    traces = Traces(collector.endpoint, "0.0")
    world = World(tmp_path, FakeEngine(PROMPT_READY, GenerationFailed("lost")), traces=traces)
    assert await ask_as_part_of(world, "", temperature=9) == 400
    assert (await world.client.post(URL, content="", headers={"content-type": "text/plain"})).status_code == 415
    assert await ask_as_part_of(world, "") == 500
    world.decoder.error = CapacityError("no decoder can be started")
    assert await ask_as_part_of(world, "", fps=2) == 503
    world.decoder.error = VideoUnsupported("no video")
    assert await ask_as_part_of(world, "", fps=2) == 415
    world.decoder.error = None
    assert await ask_as_part_of(world, "", stream=True) == 200, "the failure comes as an event"
    traces.close()
    spans = [span for span in collector.spans if span.name == f"POST {URL}"]
    unset, error = Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR
    assert [(attributes(span)["http.response.status_code"], span.status.code) for span in spans] == [
        (400, unset), (415, unset), (500, error), (503, error), (415, unset), (200, error),
    ]  # fmt: skip
    assert attributes(spans[0])["error.type"] == "InvalidRequest"
    assert attributes(spans[2])["vidspec.outcome"] == "error"
    assert [span.status.message for span in spans[3:]] == ["no decoder can be started", "", "lost"]


async def test_at_the_end_a_collector_that_hangs_is_given_up_for_all_batches_at_once(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry.traces, "_TIMEOUT_S", 0.5)
    collector.may_answer.clear()
    traces = Traces(collector.endpoint, "0.0")
    for _ in range(2048):  # as many as wait at most, in batches of 512
        with traces.begin({}, "POST /", status_of) or nullcontext():
            pass
    traces.close()
    assert 1 <= collector.num_asked <= 3  # of four: the one under way, and what fits into the time left


async def test_a_collector_that_is_away_costs_no_request_and_little_of_the_end(tmp_path: Path) -> None:
    with collecting() as gone:
        endpoint = gone.endpoint
    traces = Traces(endpoint, "0.0")
    world = World(tmp_path, traces=traces)
    assert (await world.ask()).status_code == 200
    began = time.monotonic()
    traces.close()
    assert time.monotonic() - began < 6
