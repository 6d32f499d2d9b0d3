"""The hostile corpus over HTTP through real decoders: every answer is a 4xx or a complete 200, without leaks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tests.component.decoding.processes import children
from tests.fakes import FakeEngine
from tests.hostile.corpus import corpus, mutated, mutations
from tests.hostile.seeds import Seeds, render_seeds
from tests.hostile.stills import still, still_bombs
from vidspec_service.api.server import bind, serve
from vidspec_service.api.services import Remotes
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.settings import Settings, decoding_limits
from vidspec_service.telemetry import Metrics

_AT_ONCE = 8
_DEADLINE_S = 60.0
_STILL = "still:"
_SECRET = Path("/etc/passwd").read_text()[:20]


@pytest.mark.parametrize(
    ("num_mutations", "with_corpus"),
    [(12, False), pytest.param(2000, True, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_strangers_files_over_http(tmp_path: Path, num_mutations: int, with_corpus: bool) -> None:
    seeds = render_seeds(tmp_path)
    upload_dir = tmp_path / "uploads"
    upload_dir.mkdir()
    gc.collect()
    before = descriptors()
    whole = chain(corpus(seeds, tmp_path), _stills(500)) if with_corpus else _stills(6)
    files = chain(whole, _mutated(seeds, num_mutations))
    statuses = asyncio.run(_serve_and_send(files, upload_dir))
    assert set(statuses) <= {200, 413, 415, 422}, statuses
    assert min(statuses[200], statuses[422]) > 0.1 * num_mutations  # enough readable and enough unreadable files
    gc.collect()
    assert children() == []
    assert list(upload_dir.iterdir()) == []
    assert len(descriptors()) <= len(before) + 1  # asyncio keeps one for signals


def descriptors() -> list[str]:
    """Open file descriptors of this process, without those of frames that are kept for follow-up questions."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor
            found.append(os.readlink(entry))
    return [target for target in found if not target.startswith("/memfd:frames")]


def _stills(count: int) -> Iterator[tuple[str, bytes]]:
    """Files to be sent as images."""
    seeds = [still(kind, orientation=6) for kind in ("PNG", "JPEG", "WEBP")]
    yield from ((f"{_STILL} {name}", content) for name, content in still_bombs())
    yield from ((f"{_STILL} mutation {i}", content) for i, content in enumerate(mutated(seeds, count, seed=4)))


def _mutated(seeds: Seeds, count: int) -> Iterator[tuple[str, bytes]]:
    return ((f"mutation {i}", content) for i, content in enumerate(mutations(seeds, count, seed=2)))


async def _serve_and_send(files: Iterator[tuple[str, bytes]], upload_dir: Path) -> Counter[int]:
    """Run the service on a fake engine; after the last answer it is told to end, and does."""
    settings = Settings(port=0, upload_dir=upload_dir, request_timeout_s=_DEADLINE_S, access_log=False)
    with bind(settings) as listener:
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with DecodePool(decoding_limits(settings, 8), settings.decode_workers) as pool:
            metrics = Metrics(CollectorRegistry())
            server = asyncio.create_task(serve(settings, FakeEngine(), pool.decode, metrics, listener, Remotes()))
            try:
                async with httpx.AsyncClient(base_url=url, timeout=_DEADLINE_S) as client:
                    return await _send(files, client)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                await server


async def _send(files: Iterator[tuple[str, bytes]], client: httpx.AsyncClient) -> Counter[int]:
    statuses = Counter[int]()

    async def sender() -> None:
        for name, content in files:  # all senders share one iterator
            statuses[await _post(name, content, client)] += 1

    async with asyncio.TaskGroup() as senders:
        for _ in range(_AT_ONCE):
            senders.create_task(sender())
    assert (await client.get("/health/live")).status_code == 200
    return statuses


async def _post(name: str, content: bytes, client: httpx.AsyncClient) -> int:
    """Send a file, named and typed as video or image; asserts that the answer is ours, complete, and leaks nothing."""
    if name.startswith(_STILL):
        url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        response = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    else:
        form = {"prompt": "What moves?", "num_frames": "4"}
        response = await client.post("/v1/video-chat", data=form, files={"video": ("clip.mp4", content, "video/mp4")})
    assert _SECRET not in response.text, name
    if response.status_code == httpx.codes.OK:
        assert response.json()["choices"][0]["finish_reason"], name
    else:
        assert response.json()["error"]["type"] == "invalid_request_error", (name, response.text)
    return response.status_code
