"""The whole application on fakes, and a client that calls it without a socket."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from tests.fakes import FakeDecodePool, FakeEngine
from vidspec_service.api.app import create_app
from vidspec_service.api.grammars import fork_server
from vidspec_service.api.grammars.checker import GrammarChecker
from vidspec_service.api.limits.deadline import Deadline
from vidspec_service.api.services import Remotes, build_services
from vidspec_service.api.store.shared import SharedVideoStore
from vidspec_service.api.uploads.fetching import Fetcher
from vidspec_service.forking import ForkServer
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics, Traces

CLIP_BYTES = b"\x00\x00\x00\x20ftypisom-not-really-a-clip"
DATA_URL = f"data:video/mp4;base64,{base64.b64encode(CLIP_BYTES).decode()}"
FILE = {"video": ("../../etc/passwd.m3u8", CLIP_BYTES, "text/html")}
URL = "/v1/video-chat"
PATIENCE_S = 20.0  # with what must come, however busy the machine
FORKS = ForkServer(fork_server.__name__, is_bare=True)


async def until(condition: Callable[[], bool]) -> None:
    """Poll `condition`, for which there is no event; fails after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def hold_deadlines(monkeypatch: pytest.MonkeyPatch, until: Callable[[], bool]) -> None:
    """No request's time is up before `until` holds, however long a busy machine takes to get there."""
    time_left, is_over = Deadline._time_left, False

    def held(deadline: Deadline) -> float:
        nonlocal is_over
        is_over = is_over or until()
        if not is_over:
            deadline._ends_at = asyncio.get_running_loop().time() + deadline._timeout_s
        return time_left(deadline)

    monkeypatch.setattr(Deadline, "_time_left", held)


def as_setting(keys: Iterable[str]) -> SecretStr | None:
    """Keys in the form an operator sets them; None: no key is required."""
    return SecretStr(joined) if (joined := ",".join(keys)) else None


class World:
    """Everything one test needs; build it inline."""

    def __init__(
        self,
        upload_dir: Path,
        engine: FakeEngine | None = None,
        decoder: FakeDecodePool | None = None,
        keys: Iterable[str] = (),
        fetcher: Fetcher | None = None,
        traces: Traces | None = None,
        store: SharedVideoStore | None = None,
        **settings: Any,
    ) -> None:
        self.upload_dir = upload_dir
        self.engine = engine or FakeEngine()
        self.decoder = decoder or FakeDecodePool()
        self.settings = Settings(upload_dir=upload_dir, api_keys=as_setting(keys), **settings)
        self.metrics = Metrics(CollectorRegistry())
        remotes = Remotes(traces=traces, videos=store)
        built = build_services(self.settings, self.engine, self.decoder.decode, self.metrics, upload_dir, remotes)
        self.services = replace(built, grammars=GrammarChecker(FORKS), fetcher=fetcher or built.fetcher)
        self.admission = self.services.admission
        self.app = create_app(self.services)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", timeout=10)

    @property
    def leftovers(self) -> list[Path]:
        """Files that should be gone."""
        return list(self.upload_dir.iterdir())

    async def ask(self, **fields: Any) -> httpx.Response:
        """A valid JSON request, with `fields` added; a field that is None is left out."""
        body = {"video": DATA_URL, "prompt": "What moves?", **fields}
        return await self.client.post(URL, json={name: value for name, value in body.items() if value is not None})

    async def ask_form(self, **fields: Any) -> httpx.Response:
        """A valid form, with `fields` added."""
        return await self.client.post(URL, files=FILE, data={"prompt": "What moves?", **fields})

    def assert_refused(self, response: httpx.Response, param: str, words: str) -> None:
        """A 400 that names the field and contains `words`, before any decoding or generation; no file is left."""
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
        assert error["param"] == param
        assert words in error["message"]
        assert (self.decoder.requests, self.engine.requests, self.leftovers) == ([], [], [])

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample on the metrics page."""
        for family in text_string_to_metric_families(self.metrics.exposition("fake-target").decode()):
            for sample in family.samples:
                if sample.name == f"vidspec:{name}" and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0
