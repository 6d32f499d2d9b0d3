"""EngineHarness: a real engine with real worker processes, driven from synchronous tests."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from vidspec_models.bundled.render import render, slot_times
from vidspec_models.bundled.scene import NUM_SLOTS, SCENE_DURATION_S, sample_scene
from vidspec_models.request import VIDEO, GenerationRequest, SamplingParams, SpeculationMode, Turn, Video
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.interface import WorkerState
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.frontend.supervisor import WorkerLauncher
from vidspec_service.engine.types import Finished, PromptReady, TextDelta
from vidspec_service.telemetry import Metrics

T = TypeVar("T")
SOURCE_FPS = 16.0


@dataclass(frozen=True)
class Answer:
    """All events of one generation."""

    started: PromptReady
    ids: tuple[int, ...]
    text: str
    finished: Finished


def scene_video(seed: int, num_frames: int = NUM_SLOTS) -> Video:
    """Frames of a rendered test scene; the default are the canonical ones."""
    times = slot_times()[:: NUM_SLOTS // num_frames]
    frames = render(sample_scene(seed), times)
    num_source = int(SCENE_DURATION_S * SOURCE_FPS)
    return Video(
        frames=frames,
        source_indices=tuple(int(time * num_source) for time in times),
        source_fps=SOURCE_FPS,
        source_num_frames=num_source,
        duration_s=SCENE_DURATION_S,
    )


def unsure_video(seed: int, num_frames: int = NUM_SLOTS) -> Video:
    """Frames that alternate between two scenes, which no real scene does: gives long, unsure answers."""
    times = (np.arange(num_frames) + 0.5) / num_frames
    frames = render(sample_scene(1000 + seed), times).copy()
    frames[1::2] = render(sample_scene(2000 + seed), times)[1::2]
    return Video(
        frames=frames,
        source_indices=tuple(range(num_frames)),
        source_fps=1.0,
        source_num_frames=num_frames,
        duration_s=float(num_frames),
    )


def ask(
    request_id: str,
    prompt: str,
    videos: Sequence[Video],
    *,
    max_tokens: int = 40,
    sampling: SamplingParams | None = None,
    speculation: SpeculationMode = SpeculationMode.AUTO,
    stop: tuple[str, ...] = (),
) -> GenerationRequest:
    """A single-turn request."""
    return GenerationRequest(
        request_id=request_id,
        turns=(Turn(role="user", parts=(*[VIDEO] * len(videos), prompt)),),
        videos=tuple(videos),
        max_tokens=max_tokens,
        sampling=sampling or SamplingParams(),
        speculation=speculation,
        stop=stop,
    )


def lasting(request: GenerationRequest) -> GenerationRequest:
    """The request with an answer so long that the draft takes part in it, however busy the machine."""
    return replace(request, ignore_eos=True, max_tokens=250)


LAUNCHER = WorkerLauncher("text")  # shared by all engines of this process: all workers come from one fork server


class EngineHarness:
    """Runs the engine's event loop in its own thread; `run` waits for a coroutine on it."""

    def __init__(
        self,
        config: EngineConfig,
        client: type[LocalEngine] = LocalEngine,
        launcher: WorkerLauncher = LAUNCHER,
    ) -> None:
        launcher.start()  # in this thread, since the fork server ends with the thread that starts it
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = client(config, Metrics(CollectorRegistry()), launcher=launcher)
        self.run(self.engine.__aenter__(), timeout_s=100)

    def close(self) -> None:
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 90) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def answer(self, request: GenerationRequest) -> Answer:
        return self.run(collect(self.engine, request))

    def answers(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Run all requests at once."""

        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*(collect(self.engine, request) for request in requests))

        return self.run(all_of_them())

    def kill(self, role: str) -> None:
        pid = self.engine.worker_pids()[role]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def wait_until_replaced(self, role: str, pid: int | None, timeout_s: float = 90) -> None:
        """Wait until another process has replaced `pid` and both workers are ready."""

        async def poll() -> None:
            # The engine has no event for this: an operator polls /health/ready as well.
            while self.engine.worker_pids()[role] == pid:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

        self.run(asyncio.wait_for(poll(), timeout_s))
        self.wait_until_ready(timeout_s)

    def wait_until_ready(self, timeout_s: float = 90) -> None:
        """Wait until both workers are ready (again)."""

        async def poll() -> None:
            while set(self.engine.status().workers.values()) != {WorkerState.READY}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

        self.run(asyncio.wait_for(poll(), timeout_s))


async def collect(engine: LocalEngine, request: GenerationRequest) -> Answer:
    """Collect all events of one generation."""
    started: PromptReady | None = None
    ids: tuple[int, ...] = ()
    text = ""
    async with aclosing(engine.generate(request)) as events:  # the garbage collector would close it later
        async for event in events:
            match event:
                case PromptReady():
                    started = event
                case TextDelta():
                    ids += event.ids
                    text += event.text
                case Finished():
                    assert started is not None
                    return Answer(started, ids, text, event)
    raise AssertionError("the generation ended without Finished")
