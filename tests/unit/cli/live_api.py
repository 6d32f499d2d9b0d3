"""The real application on fakes, listening on a free local port until the block ends."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

from tests.api.world import as_setting
from tests.fakes import FakeDecodePool, FakeEngine
from vidspec_service.api.app import create_app
from vidspec_service.api.server import bind
from vidspec_service.api.services import Remotes, build_services
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics


@contextmanager
def live_api(
    upload_dir: Path, engine: FakeEngine, decoder: FakeDecodePool | None = None, keys: Iterable[str] = ()
) -> Iterator[str]:
    """Yield the application's URL."""
    upload_dir.mkdir()
    settings = Settings(port=0, upload_dir=upload_dir, api_keys=as_setting(keys))
    decode, metrics = (decoder or FakeDecodePool()).decode, Metrics(CollectorRegistry())
    services = build_services(settings, engine, decode, metrics, upload_dir, Remotes())
    server = uvicorn.Server(uvicorn.Config(create_app(services), log_config=None, access_log=False, lifespan="off"))
    with closing(services.grammars), bind(settings) as listener:
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
