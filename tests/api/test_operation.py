"""Health, metrics, the model list, request ids, headers, unknown routes and internal errors."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cachetools import TTLCache
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import StreamingResponse
from starlette.types import Message

from tests.api.chat import ask
from tests.api.uploads import ALICE
from tests.api.world import CLIP_BYTES, FILE, PATIENCE_S, World, until
from tests.fakes import ANSWER, FINISHED, INFO, PROMPT_READY, FakeEngine
from vidspec_models.step_path import COMPILED, torch_fallback
from vidspec_service import __version__
from vidspec_service.api.routes import health
from vidspec_service.engine.types import TextDelta
from vidspec_service.errors import GenerationFailed
from vidspec_service.telemetry import Metrics

pytestmark = [pytest.mark.api, pytest.mark.anyio]


async def test_a_loading_service_is_alive_and_not_ready(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(is_ready=False))
    live = await world.client.get("/health/live")
    assert (live.status_code, live.json()) == (200, {"status": "ok", "reasons": []})
    ready = await world.client.get("/health/ready")
    assert ready.status_code == 503
    assert ready.json() == {"status": "unavailable", "reasons": ["target worker is starting"]}
    assert (await world.client.get("/v1/models")).status_code == 503
    assert (await world.client.get("/metrics")).status_code == 200


async def test_a_server_may_begin_and_end_the_life_of_an_application_that_asks_for_keys(tmp_path: Path) -> None:
    """Ray Serve does, without a key and a path."""
    asked = iter(["lifespan.startup", "lifespan.shutdown"])
    told = []

    async def receive() -> Message:
        return {"type": next(asked)}

    async def send(message: Message) -> None:
        told.append(message["type"])

    await World(tmp_path, keys=[ALICE]).app({"type": "lifespan"}, receive, send)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
async def test_probes_may_ask_for_no_body(tmp_path: Path, path: str) -> None:
    assert (await World(tmp_path).client.head(path)).status_code == 200
    loading = World(tmp_path, FakeEngine(is_ready=False))
    assert (await loading.client.head(path)).status_code == (await loading.client.get(path)).status_code


async def test_a_method_of_a_strangers_making_is_cut_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        await World(tmp_path).client.request("M" * 5000, "/nowhere")
    (answered,) = (record for record in caplog.records if record.message == "answered")
    assert vars(answered)["method"] == "M" * 16


async def test_the_log_has_how_long_an_answer_took_and_probes_as_news_only_while_they_fail(
    tmp_path: Path, log: io.StringIO
) -> None:
    for engine in (FakeEngine(), FakeEngine(is_ready=False)):
        world = World(tmp_path, engine)
        for path in ("/health/ready", "/metrics"):
            await world.client.get(path)
    lines = [json.loads(line) for line in log.getvalue().splitlines() if '"answered"' in line]
    assert [line["level"] for line in lines] == ["debug", "debug", "info", "debug"]
    assert all(0 <= line["duration_s"] < PATIENCE_S for line in lines)


async def test_a_worker_that_fell_back_is_ready_and_told_to_probes_and_dashboards(tmp_path: Path) -> None:
    engine = FakeEngine()
    world = World(tmp_path, engine)
    engine.step_paths = {"target": torch_fallback("the kernels do not compile", "a folder /secret"), "draft": COMPILED}
    ready = await world.client.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "ok")
    (warning,) = ready.json()["warnings"]
    assert warning == "the target is several times slower than it should be: the kernels do not compile"
    page = (await world.client.get("/metrics")).text
    assert re.search(r'^vidspec:worker_fallback{.*role="target".*} 1.0$', page, re.MULTILINE)
    assert re.search(r'^vidspec:worker_fallback{.*role="draft".*} 0.0$', page, re.MULTILINE)


async def test_a_loaded_service_is_ready_until_it_drains(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert (await world.client.get("/health/ready")).json() == {"status": "ok", "reasons": []}
    world.admission.start_draining()
    ready = await world.client.get("/health/ready")
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["draining"])
    assert (await world.client.get("/health/live")).status_code == 200


async def test_one_model_is_looked_at_by_its_name(tmp_path: Path) -> None:
    client = World(tmp_path).client
    listed = (await client.get("/v1/models")).json()["data"][0]
    assert (await client.get("/v1/models/fake-target")).json() == listed
    other = await client.get("/v1/models/meta/other")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_model_list_has_openais_shape(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.known = replace(INFO, default_sampling={"temperature": 0.7})
    answer = (await World(tmp_path, engine).client.get("/v1/models")).json()
    assert {card.pop("created") > 1_700_000_000 for card in answer["data"]} == {True}
    rest: dict[str, Any] = {
        "object": "model",
        "owned_by": "vidspec",
        "root": "org/fake-target",
        "parent": None,
        "max_model_len": 1024,
    }
    rest["default_sampling"] = {"temperature": 0.7}
    assert answer == {"object": "list", "data": [{"id": "fake-target", **rest}, {"id": "fake-alias", **rest}]}


async def test_every_name_of_the_model_is_taken_and_the_first_is_told(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert (await world.client.get("/v1/models/fake-alias")).json()["id"] == "fake-alias"
    assert (await ask(world, model="fake-alias")).json()["model"] == "fake-target"
    assert (await ask(world, model="other")).status_code == 404


async def test_health_and_version_are_where_vllm_has_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    health = await world.client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    world.admission.start_draining()
    health = await world.client.get("/health")
    assert (health.status_code, health.content) == (503, b"")
    assert (await World(tmp_path, FakeEngine(is_ready=False)).client.get("/health")).status_code == 503
    assert (await world.client.get("/version")).json() == {"version": __version__}


async def test_the_metrics_of_ours_and_no_others_are_labelled_with_the_model_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, FakeEngine(is_ready=False), served_model_name="a,b")
    page = (await world.client.get("/metrics")).text
    found = [(each.name.startswith("vidspec:"), each.samples) for each in text_string_to_metric_families(page)]
    assert {(is_ours, each.labels.get("model_name")) for is_ours, samples in found for each in samples} == {
        (True, "a"), (False, None),
    }  # fmt: skip
    assert 'vidspec:worker_ready{model_name="a",role="target"}' in page


@pytest.mark.parametrize("prefix", ["/video", ""])  # the proxy keeps its path prefix, or strips it
async def test_behind_the_path_of_a_proxy_everything_is_found(tmp_path: Path, prefix: str) -> None:
    world = World(tmp_path, keys=["key-0123456789abcdef"], root_path="/video/")
    headers = {"authorization": "Bearer key-0123456789abcdef"}
    assert (await world.client.get(f"{prefix}/health/live")).status_code == 200
    assert (await world.client.get(f"{prefix}/v1/models")).status_code == 401
    assert (await world.client.get(f"{prefix}/v1/models", headers=headers)).status_code == 200
    document = (await world.client.get(f"{prefix}/openapi.json", headers=headers)).json()
    assert document["servers"] == [{"url": "/video"}]
    page = (await world.client.get(f"{prefix}/docs", headers=headers)).text
    assert all(
        f"/video/{name}" in page for name in ("docs/openapi.json", "docs/swagger-ui.css", "docs/swagger-ui-bundle")
    )


async def test_the_metrics_of_a_request_are_those_of_its_answer(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ask()
    await world.ask(stream=True)
    await world.ask(prompt=None)
    await world.client.get("/nowhere/secret")
    await world.client.get("/metrics")
    assert world.metric("prompt_tokens_total") == 80
    assert world.metric("generation_tokens_total") == 10
    assert world.metric("request_success_total", finished_reason="stop") == 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds",
                 "request_queue_time_seconds", "request_prefill_time_seconds", "video_tokens",
                 "request_time_per_output_token_seconds", "request_generation_tokens"):  # fmt: skip
        assert world.metric(f"{name}_count") == 2, name
    assert world.metric("inter_token_latency_seconds_count") == 4
    assert 0.5 < world.metric("request_queue_time_seconds_sum") < 0.6, "in the API's queue, too"
    assert (world.metric("video_upload_bytes_sum"), world.metric("video_frames_sampled_sum")) == (len(CLIP_BYTES), 3)
    assert world.metric("video_decode_seconds_sum") < time.monotonic(), "a duration, not a time"
    for name in ("video_decode_seconds_count", "mm_cache_hits_total"):
        assert world.metric(name) == 1, name  # the second question was about the same video and hit the cache
    assert world.metric("mm_cache_queries_total") == 2
    assert world.metric("prefix_cache_queries_total") == 80
    assert world.metric("prefix_cache_hits_total") == 4
    assert world.metric("http_requests_total", route="/v1/video-chat", status="200", method="POST") == 2
    assert world.metric("http_requests_total", route="/v1/video-chat", status="400") == 1
    assert world.metric("http_requests_total", route="unmatched", status="404") == 1
    assert world.metric("num_requests_waiting") == 0
    assert world.metric("worker_ready", role="target") == 1


async def test_the_metrics_count_what_runs_and_what_waits_in_the_engine(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(*ANSWER[:2], gate, *ANSWER[2:]))
    world.engine.num_waiting = 3
    asking = asyncio.create_task(world.ask())
    await until(lambda: world.engine.num_held == 1)
    await world.client.get("/metrics")
    assert (world.metric("num_requests_running"), world.metric("num_requests_waiting")) == (1, 3)
    gate.set()
    await asking


async def test_the_metrics_tell_the_times_that_the_answer_tells(tmp_path: Path) -> None:
    world = World(tmp_path)
    timings = (await world.ask()).json()["timings"]
    seconds = {
        name: world.metric(f"{name}_seconds_sum")
        for name in ("time_to_first_token", "inter_token_latency", "request_decode_time", "request_inference_time",
                     "request_time_per_output_token")
    }  # fmt: skip
    assert seconds["time_to_first_token"] == pytest.approx(timings["time_to_first_token_s"], abs=1e-6)
    assert seconds["request_time_per_output_token"] == pytest.approx(timings["time_per_output_token_s"], abs=1e-6)
    assert seconds["request_decode_time"] == pytest.approx(seconds["inter_token_latency"])
    assert seconds["request_decode_time"] == pytest.approx(4 * seconds["request_time_per_output_token"])
    assert seconds["request_inference_time"] == pytest.approx(timings["prefill_s"] + seconds["request_decode_time"])


async def test_an_answer_of_one_token_has_no_time_between_tokens_and_what_was_held_back_is_none(tmp_path: Path) -> None:
    one, held = TextDelta(text="A", num_tokens=1), TextDelta(text="B", num_tokens=0)
    world = World(tmp_path, FakeEngine(PROMPT_READY, one, held, FINISHED))
    answer = (await world.ask()).json()
    assert answer["choices"][0]["message"]["content"] == "AB"
    assert answer["timings"]["time_per_output_token_s"] == 0.0
    assert world.metric("time_to_first_token_seconds_count") == 1
    for name in ("inter_token_latency_seconds", "request_time_per_output_token_seconds"):
        assert world.metric(f"{name}_count") == 0, name


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0"])
async def test_metrics_parse_and_keep_their_colons_whatever_a_scraper_prefers(tmp_path: Path, accept: str) -> None:
    world = World(tmp_path)
    response = await world.client.get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in text_string_to_metric_families(response.text)}
    assert {
        "vidspec:spec_decode_num_drafts", "vidspec:spec_decode_num_draft_tokens",
        "vidspec:spec_decode_num_accepted_tokens", "vidspec:num_requests_running",
        "vidspec:time_to_first_token_seconds", "process_resident_memory_bytes",
    } <= names  # fmt: skip
    assert "_created" not in response.text


async def test_the_metrics_are_written_once_a_second_however_often_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = 0.0, list[float]()

    def write(*_: object) -> bytes:
        written.append(now)
        return b""

    monkeypatch.setattr(health, "TTLCache", partial(TTLCache, timer=lambda: now))
    monkeypatch.setattr(Metrics, "exposition", write)
    world = World(tmp_path)
    for now in (0.0, 0.9, 1.1):  # noqa: B007  the cache's clock
        assert (await world.client.get("/metrics")).status_code == 200
    assert written == [0.0, 1.1]


async def test_a_worker_that_is_not_ready_is_told_to_alerts(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(is_ready=False))
    await world.client.get("/metrics")
    assert world.metric("worker_ready", role="target") == 0


async def test_metrics_can_be_turned_off(tmp_path: Path) -> None:
    assert (await World(tmp_path, metrics=False).client.get("/metrics")).status_code == 404


async def test_the_method_a_client_invents_is_not_a_label(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.client.request("SECRET", "/v1/models")
    assert world.metric("http_requests_total", method="other", status="405") == 1


@pytest.mark.parametrize("given", ["req-1", "a" * 128])
async def test_a_sane_request_id_is_echoed(tmp_path: Path, given: str) -> None:
    response = await World(tmp_path).client.get("/health/live", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", 'a"b', "<script>"])
async def test_any_other_request_id_is_replaced(tmp_path: Path, given: str) -> None:
    response = await World(tmp_path).client.get("/health/live", headers={"x-request-id": given})
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


async def test_an_unknown_route_and_a_wrong_method_have_the_usual_shape(tmp_path: Path) -> None:
    world = World(tmp_path)
    unknown = await world.client.get("/v1/nothing")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert f"no route {unknown.url.path} here" in unknown.json()["error"]["message"]
    assert "allow" not in unknown.headers
    assert len((await world.client.get("/" + "x" * 50_000)).text) < 300
    wrong = await world.client.get("/v1/video-chat")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert set(wrong.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/videos", "GET, POST"),
        ("/v1/videos/video-1", "DELETE, GET"),
        ("/health/live", "GET, HEAD"),
        ("/", "GET, HEAD"),
        ("/v1/models/a/b", "GET"),
    ],
)
async def test_a_method_that_a_path_has_not_is_answered_with_all_that_it_has(
    tmp_path: Path, path: str, methods: str
) -> None:
    answer = await World(tmp_path).client.patch(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


async def test_the_log_says_why_an_upload_cannot_be_stored_and_the_answer_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await World(tmp_path / "gone").client.post("/v1/videos", files=FILE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    (line,) = [record for record in caplog.records if record.message == "request refused"]
    reason = f"No such file or directory: {tmp_path / 'gone'} (upload_dir)"
    assert (line.levelname, line.__dict__["reason"]) == ("WARNING", reason)
    assert "directory" not in answer.text


@pytest.mark.parametrize("path", ["/v1/videos/", "/v1/video-chat/", "/health/live/"])
async def test_no_path_is_redirected_to_an_address_made_of_the_clients_host(tmp_path: Path, path: str) -> None:
    response = await World(tmp_path).client.get(path, headers={"host": "evil.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_fastapis_own_validation_errors_are_400s_of_the_usual_shape(tmp_path: Path) -> None:
    world = World(tmp_path)

    @world.app.get("/later")
    async def later(count: int) -> int:
        return count

    response = await world.client.get("/later", params={"count": "many"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "count"


async def test_a_failure_of_the_engine_is_told_to_the_log_and_not_to_the_client(
    tmp_path: Path, log: io.StringIO
) -> None:
    response = await World(tmp_path, FakeEngine(GenerationFailed("CUDA error at 0xdeadbeef"))).ask()
    assert "0xdeadbeef" not in response.text
    assert response.headers["x-should-retry"] == "false"  # otherwise OpenAI's clients would retry twice
    failed = json.loads(next(line for line in log.getvalue().splitlines() if "request failed" in line))
    assert (failed["level"], failed["reason"]) == ("error", "CUDA error at 0xdeadbeef")
    assert "exception" not in failed, "the worker's log has the traceback that tells something"
    assert failed["request_id"] in response.json()["error"]["message"]


async def test_a_bug_is_a_500_with_the_id_under_which_the_log_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, FakeEngine(ZeroDivisionError("at /secret/path")))
    with caplog.at_level(logging.ERROR):
        response = await world.ask()
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in response.text
    assert "ZeroDivisionError" in caplog.text
    assert (world.admission.num_admitted, world.leftovers) == (0, [])


async def test_a_page_of_a_named_site_can_read_that_a_bug_was_met(tmp_path: Path, log: io.StringIO) -> None:
    world = World(tmp_path, FakeEngine(ZeroDivisionError()), cors_origins=("https://page.example",))
    world.client.headers["origin"] = "https://page.example"
    response = await world.ask()
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (500, "https://page.example")
    answered = json.loads(log.getvalue().splitlines()[-1])
    assert (answered["event"], answered["status"]) == ("answered", 500)


async def test_a_bug_in_the_middle_of_an_answer_is_logged_and_begins_no_second_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, sent = World(tmp_path), list[Message]()

    async def half() -> AsyncIterator[bytes]:
        yield b"x"
        raise ZeroDivisionError

    @world.app.get("/later")
    async def later() -> StreamingResponse:
        return StreamingResponse(half())

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/later", "query_string": b"", "headers": []}
    await world.app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert "unhandled error" in caplog.text


async def test_without_an_access_log_no_answer_is_in_the_log(tmp_path: Path, log: io.StringIO) -> None:
    await World(tmp_path, access_log=False).client.get("/version")
    assert '"answered"' not in log.getvalue()
    await World(tmp_path).client.get("/version")
    assert '"answered"' in log.getvalue()


async def test_the_log_has_the_beginning_of_a_path_that_has_no_end(tmp_path: Path, log: io.StringIO) -> None:
    await World(tmp_path, keys=["the-key-0123456789abcdef"]).client.get("/" + "x" * 50_000)
    assert '"path": "/xxx' in log.getvalue()
    assert len(log.getvalue()) < 1000


async def test_the_log_tells_each_request_by_its_id_and_never_the_prompt(tmp_path: Path, log: io.StringIO) -> None:
    world = World(tmp_path)
    await world.client.post("/v1/video-chat", json={"prompt": "hush-hush", "fps": -1}, headers={"x-request-id": "r-1"})
    await world.ask(prompt="hush-hush")
    lines = log.getvalue().splitlines()
    assert lines
    assert not [line for line in lines if "hush" in line or "squ" in line]
    entries = [json.loads(line) for line in lines]
    answered = [entry for entry in entries if entry["event"] == "answered" and "path" in entry]
    assert [entry["status"] for entry in answered] == [400, 200]
    assert answered[0]["request_id"] == "r-1"
    ended = next(entry for entry in entries if entry["event"] == "request ended")
    assert ended["request_id"] == answered[1]["request_id"]
    facts = {name: ended[name] for name in ("outcome", "completion_tokens", "mode", "acceptance_rate")}
    assert facts == {"outcome": "stop", "completion_tokens": 5, "mode": "parallel", "acceptance_rate": 0.75}
    assert 0.25 <= ended["queue_s"] < 1  # includes the engine's 0.25 s
    assert 0 < ended["first_token_s"] <= ended["duration_s"]


async def test_the_log_tells_no_time_of_a_first_token_that_never_came(tmp_path: Path, log: io.StringIO) -> None:
    assert (await World(tmp_path, FakeEngine(PROMPT_READY, GenerationFailed("lost"))).ask()).status_code == 500
    entries = [json.loads(line) for line in log.getvalue().splitlines()]
    ended = next(entry for entry in entries if entry["event"] == "request ended")
    assert (ended["outcome"], ended.get("first_token_s")) == ("error", None)
