"""For `make test-all`: thousands of HTTP requests, a third of them hostile, while the workers are killed in turn.

No request is lost, no text changes, and the server's memory, file descriptors and processes do not grow.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.processes import Served, running
from tests.hostile.corpus import corpus, mutations
from tests.hostile.seeds import render_seeds
from vidspec_models.request import SpeculationMode
from vidspec_service.api.limits.deadline import background_task
from vidspec_service.api.store.clip_cache import MIN_CLIP_BYTES
from vidspec_service.bench.serve.load import render_clips

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

_AT_ONCE = 12
_PATIENCE_S = 300.0
_NUM_KINDS = 32  # kinds of honest questions
_WARM_UP = 1500  # requests until the caches of clips and texts are full and both workers were replaced
_WARM_UP_KILL_EVERY_S = 15.0
_NUM_CLIPS = 8
_CACHES = f"--max-cached-frame-bytes={_NUM_CLIPS * MIN_CLIP_BYTES}", "--max-cached-feature-bytes=16777216"

Sender = Callable[[str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the server holds while no request runs."""

    resident_bytes: int
    num_descriptors: int
    num_processes: int


class Soak:
    """Senders of every kind; the right texts of honest questions are known from an undisturbed run."""

    def __init__(self, client: httpx.AsyncClient, files: Iterator[bytes], clips: list[bytes]) -> None:
        self._client, self._files, self._clips = client, files, clips
        self._dice = random.Random(2)
        self._calm: dict[int, str] = {}
        self._senders: list[tuple[Sender, float]] = [
            (self._ask, 0.55),
            (self._leave, 0.1),
            (self._send_hostile_file, 0.2),
            (self._send_odd_body, 0.1),
            (self._ask_too_much, 0.05),
        ]

    async def listen(self) -> None:
        """Collect the right texts."""
        for kind in range(_NUM_KINDS):
            self._calm[kind] = await self._answer(kind, SpeculationMode.OFF)

    async def show_clips(self) -> None:
        """Send every clip once, so that the frame cache holds these clips and nothing from hostile files."""
        for number, clip in enumerate(self._clips):
            form = {"prompt": "Hello.", "max_tokens": "1"}
            response = await self._client.post("/v1/video-chat", data=form, files={"video": ("clip.mp4", clip)})
            assert response.status_code == httpx.codes.OK, (number, response.text)

    async def run(self, count: int) -> Counter[str]:
        """Send `count` requests, several at a time; returns how often each outcome occurred."""
        senders, weights = zip(*self._senders, strict=True)
        chosen = iter(self._dice.choices(senders, weights, k=count))
        told = Counter[str]()

        async def one_after_another() -> None:
            for number, send in enumerate(chosen):
                told[await send(str(number))] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(one_after_another())
        return told

    async def _ask(self, number: str) -> str:
        kind = self._dice.randrange(_NUM_KINDS)
        text = await self._answer(kind, self._dice.choice(list(SpeculationMode)))
        assert text == self._calm[kind], (number, kind)
        return "answered"

    async def _answer(self, kind: int, mode: SpeculationMode) -> str:
        response = await self._client.post(**self._question(kind, mode, is_streamed=kind % 4 > 1))
        assert response.status_code == httpx.codes.OK, response.text
        if kind % 4 <= 1:
            return str(response.json()["choices"][0]["message"]["content"])
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]", response.text
        facts = [json.loads(event) for event in events]
        assert not any("error" in fact for fact in facts), response.text
        return "".join(choice.get("delta", {}).get("content", "") for fact in facts for choice in fact["choices"])

    def _question(self, kind: int, mode: SpeculationMode, *, is_streamed: bool) -> dict[str, Any]:
        """Odd kinds show a clip, the others are text only."""
        fields: dict[str, Any] = {
            "prompt": "Describe the video.",
            "max_tokens": 10 + kind,
            "temperature": 0.5,
            "seed": kind,
            "stream": is_streamed,
            "speculation": mode.value,
        }
        if kind % 2:
            files = {"video": ("clip.mp4", self._clips[kind % len(self._clips)], "video/mp4")}
            form = {name: json.dumps(value).strip('"') for name, value in fields.items()}
            return {"url": "/v1/video-chat", "data": form, "files": files}
        return {"url": "/v1/video-chat", "json": fields}

    async def _leave(self, _: str) -> str:
        """Disconnect after a random time, whatever has arrived."""
        question = self._question(self._dice.randrange(_NUM_KINDS), SpeculationMode.PARALLEL, is_streamed=True)
        answer = asyncio.ensure_future(self._client.post(**question))
        await asyncio.wait([answer], timeout=self._dice.uniform(0.0, 1.0))
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        return "left"

    async def _send_hostile_file(self, number: str) -> str:
        form = {"prompt": "What moves?", "num_frames": "4", "max_tokens": "8"}
        files = {"video": ("clip.mp4", next(self._files), "video/mp4")}
        response = await self._client.post("/v1/video-chat", data=form, files=files)
        assert response.status_code in (200, 413, 415, 422), (number, response.text)
        return f"file {response.status_code}"

    async def _send_odd_body(self, number: str) -> str:
        body = self._dice.choice(
            [
                json.dumps({"prompt": "x", "k" * 200_000: 1}),
                json.dumps({"prompt": "x", "max_tokens": 2**70}),
                json.dumps({"prompt": "x", "temperature": [[[[1]]]]}),
                '{"prompt": "x", "stop": ' + "[" * 5_000 + "]" * 5_000 + "}",
                json.dumps({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}),
                "\x00" * 1_000,
            ]
        )
        headers = {"content-type": "application/json"}
        response = await self._client.post("/v1/video-chat", content=body, headers=headers)
        assert response.status_code == httpx.codes.BAD_REQUEST, (number, response.text)
        return "odd body"

    async def _ask_too_much(self, number: str) -> str:
        response = await self._client.post("/v1/video-chat", json={"prompt": "\U0001f3a5" * 20_000})
        assert response.status_code == httpx.codes.BAD_REQUEST, (number, response.text)
        return "too long"


async def _kill_in_turns(server: Served, every_s: float) -> None:
    while True:
        for role in ("vidspec-target", "vidspec-draft"):
            await asyncio.sleep(every_s)
            for process in _processes(server):
                if process.name() == role:
                    process.kill()


def _processes(server: Served) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in server.family()]


async def _footprint(server: Served, client: httpx.AsyncClient) -> Footprint:
    """The footprint once both workers are ready and no request runs; raises TimeoutError if that never happens."""
    async with asyncio.timeout(120):
        while True:
            page = (await client.get("/metrics")).text
            samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
            busy = sum(each.value for each in samples if each.name.startswith("vidspec:num_requests_"))
            ready = sum(each.value for each in samples if each.name == "vidspec:worker_ready")
            if not busy and ready == len(("target", "draft")):
                break
            await asyncio.sleep(0.5)
    await asyncio.sleep(5.0)  # cleanup after abandoned requests takes a moment
    api = psutil.Process(server.process.pid)
    # How many connections rest is up to the client; one that it has left is no longer established.
    num_resting = sum(each.status == psutil.CONN_ESTABLISHED for each in api.net_connections("tcp"))
    return Footprint(api.memory_info().rss, api.num_fds() - num_resting, len(server.family()))


@pytest.mark.parametrize(("count", "kill_every_s"), [(400, 8.0), (10_000, 60.0)])
def test_nothing_is_lost_and_no_text_changes_while_workers_die(tmp_path: Path, count: int, kill_every_s: float) -> None:
    seeds = render_seeds(tmp_path)
    known = [content for _, content in corpus(seeds, tmp_path)]
    files = iter([*mutations(seeds, 10_000, seed=3), *known])
    uploads = tmp_path / "uploads"
    flags = ["--port=0", "--log-format=json", "--no-access-log", f"--upload-dir={uploads}", *_CACHES]

    async def soak(server: Served) -> tuple[Counter[str], Footprint, Footprint]:
        async with httpx.AsyncClient(base_url=server.url, timeout=_PATIENCE_S) as client:
            soaked = Soak(client, files, render_clips(_NUM_CLIPS, is_mixed=True))
            await soaked.listen()
            async with background_task(_kill_in_turns(server, _WARM_UP_KILL_EVERY_S)):
                await soaked.run(_WARM_UP)
            await soaked.show_clips()
            before = await _footprint(server, client)
            async with background_task(_kill_in_turns(server, kill_every_s)):
                told = await soaked.run(count)
            await soaked.show_clips()
            return told, before, await _footprint(server, client)

    with running([sys.executable, "-m", "vidspec_service", "serve", *flags]) as server:
        began = time.monotonic()
        told, before, after = asyncio.run(soak(server))
        print(f"{count} in {time.monotonic() - began:.0f} s: {dict(told)}; {before} -> {after}")  # noqa: T201
        left = [path for path in uploads.rglob("*") if path.is_file() and path.suffix != ".lock"]
        assert sum(told.values()) == count
        assert after.resident_bytes < 1.03 * before.resident_bytes
        assert after.num_descriptors <= before.num_descriptors
        assert after.num_processes <= before.num_processes
        assert not left
