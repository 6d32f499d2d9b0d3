"""The frontend of a cluster, outside Ray: the API over whatever engines there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray import serve

from tests.api.world import until
from tests.component.decoding.processes import children, decoders
from tests.fakes import INFO, FakeEngine
from vidspec_service.api.server import running_app
from vidspec_service.cluster import application, ray_engine
from vidspec_service.cluster.application import Frontend
from vidspec_service.cluster.engine_replica import EngineFacts
from vidspec_service.cluster.ray_engine import ENGINES
from vidspec_service.settings import ClusterSettings

pytestmark = pytest.mark.component


@pytest.mark.parametrize(("engines", "becomes_unready"), [("0-3", False), ("1-3", True)])
def test_a_frontend_may_keep_all_engines_busy_and_is_ready_while_they_sleep(
    engines: str, becomes_unready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    num_counts = 0

    async def facts() -> EngineFacts:
        return EngineFacts(info=INFO, tokenizer=FakeEngine().tokenizer.to_str())

    @asynccontextmanager
    async def running(settings: Any, *more: Any) -> AsyncIterator[Any]:
        taken.append(settings)
        async with running_app(settings, *more) as app:
            yield app

    def no_engine_runs() -> Any:
        nonlocal num_counts
        num_counts += 1
        deployed = SimpleNamespace(deployments={ENGINES: SimpleNamespace(replica_states={})})
        return SimpleNamespace(applications={"app": deployed})

    monkeypatch.setattr(application, "running_app", running)
    monkeypatch.setattr(serve, "status", no_engine_runs)
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="app"))
    monkeypatch.setattr(ray_engine, "_COUNT_EVERY_S", 0.01)
    settings = ClusterSettings(
        engines=engines, max_running_requests=5, decode_workers=1, upload_dir=tmp_path, metrics_open=True
    )

    async def scenario() -> None:
        frontend: Any = SimpleNamespace()  # no instance of its own: it could not be deleted outside Ray
        await Frontend.__init__(frontend, settings, SimpleNamespace(facts=SimpleNamespace(remote=facts)))
        try:
            await until(lambda: num_counts > 1)
            (settings_in_force,) = taken
            assert settings_in_force.max_running_requests == 15
            assert decoders()
            transport = httpx.ASGITransport(Frontend.__serve_build_asgi_app__(frontend))
            async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
                assert (await client.get("/health/ready")).is_success != becomes_unready
                metrics = (await client.get("/metrics")).text
            (build,) = (line for line in metrics.splitlines() if line.startswith("vidspec:build_info"))
            for told in (f'model="{INFO.model}"', f'draft_model="{INFO.draft_model}"', 'torch="0"'):
                assert told in build
        finally:
            await Frontend.__del__(frontend)
        assert children() == []

    asyncio.run(scenario())
