"""Stand-ins for what the API talks to: an engine that plays a script and a decoder that returns one clip."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from vidspec_models.request import GenerationRequest, SpeculationMode, Video
from vidspec_models.step_path import StepPath
from vidspec_service.decoding.clip import Clip, FrameRequest
from vidspec_service.engine.frontend.interface import EngineInfo, EngineStatus, WorkerState
from vidspec_service.engine.kv_budget import DeviceMemory, WorkerMemory
from vidspec_service.engine.types import (
    Finished,
    FinishReason,
    GenerationEvent,
    Logprob,
    PromptReady,
    SpeculationStats,
    TextDelta,
    TokenLogprob,
)
from vidspec_service.errors import EngineDead

MEMORY = WorkerMemory(
    context=1024,
    measured_at=0.0,
    devices=(DeviceMemory(device="cpu", total=8000, free=6000, weights=1000, activations=500, token_bytes=2),),
)
INFO = EngineInfo(
    model_names=("fake-target", "fake-alias"),
    root="org/fake-target",
    draft_model="fake-draft",
    context_length=1024,
    default_num_frames=8,
    default_max_tokens=64,
    devices={"target": "cpu", "draft": "cpu"},
    versions={"torch": "0"},
    kv_cache_tokens={"target": 1024},
    memory={"target": MEMORY},
)
PROMPT_READY = PromptReady(request_id="", prompt_tokens=40, video_tokens=30, queue_s=0.125, prepare_s=0.0625)
FINISHED = Finished(
    finish_reason=FinishReason.STOP,
    completion_tokens=5,
    speculation=SpeculationStats(
        mode=SpeculationMode.PARALLEL,
        num_drafts=2,
        num_draft_tokens=4,
        num_accepted_tokens=3,
        num_verifications=2,
        draft_video_tokens=3,
    ),
    queue_s=0.25,
    prefill_s=0.5,
    cached_tokens=2,
)

Step = GenerationEvent | Exception | asyncio.Event
"""An event to yield, an error to raise, or an asyncio event to wait for."""

ANSWER: tuple[Step, ...] = (
    PROMPT_READY,
    TextDelta(text="A red", num_tokens=2),
    TextDelta(text="", num_tokens=1),
    TextDelta(text=" squäre.", num_tokens=2),
    FINISHED,
)


def token_deltas(*tokens: str | bytes, choice: int = 0) -> list[TextDelta]:
    """A delta for each token, whose log probability is minus its place; bytes may be parts of a character."""
    decoder, deltas, offset = codecs.getincrementaldecoder("utf-8")("replace"), list[TextDelta](), 0
    for place, token in enumerate(tokens):
        written = token.encode() if isinstance(token, str) else token
        logprob = TokenLogprob(offset=offset, token=Logprob(written, -float(place)), top=())
        deltas.append(TextDelta(text=decoder.decode(written), num_tokens=1, choice=choice, logprobs=(logprob,)))
        offset += len(deltas[-1].text)
    return deltas


class FakeEngine:
    """Plays the same script for every request and records which requests were cancelled in the middle of it."""

    def __init__(self, *script: Step, is_ready: bool = True) -> None:
        self.script = script or ANSWER
        self.is_ready = is_ready
        self.known = INFO
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.num_running = self.num_waiting = 0
        self.num_held = 0  # answers that have come to an asyncio event
        self.step_paths: dict[str, StepPath] = {}

    @property
    def info(self) -> EngineInfo:
        if not self.is_ready:
            raise EngineDead("the target worker died with /secret/path in its message")
        return self.known

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer(WordLevel({"what": 0, "moves": 1, "?": 2}, unk_token="?"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        return tokenizer

    def status(self) -> EngineStatus:
        state = WorkerState.READY if self.is_ready else WorkerState.STARTING
        return EngineStatus(
            workers={"target": state},
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            step_paths=self.step_paths,
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self.num_running += 1
        is_played = False
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.num_held += 1
                    await step.wait()
                else:
                    yield step
            is_played = True
        finally:
            self.num_running -= 1
            if not is_played:
                self.cancelled.append(request.request_id)


def clip(num_frames: int = 3) -> Clip:
    """A grey clip of one frame per second."""
    return Clip(
        video=Video(
            frames=np.full((num_frames, 4, 6, 3), 128, np.uint8),
            source_indices=tuple(25 * second for second in range(num_frames)),
            source_fps=25.0,
            source_num_frames=25 * num_frames,
            duration_s=float(num_frames),
        ),
        timestamps_s=tuple(float(second) for second in range(num_frames)),
        source_indices=tuple(25 * second for second in range(num_frames)),
        source_fps=25.0,
        source_num_frames=25 * num_frames,
        duration_s=float(num_frames),
        width=6,
        height=4,
        codec="h264",
        warnings=("2 frames could not be decoded",),
    )


class FakeDecodePool:
    """Returns one clip, or raises `error`, once `gate` is open; records the requests and the file contents."""

    def __init__(self, error: Exception | None = None, gate: asyncio.Event | None = None) -> None:
        self.error = error
        self.gate = gate
        self.requests: list[FrameRequest] = []
        self.contents: list[bytes] = []
        self.num_cancelled = 0

    async def decode(self, path: Path, request: FrameRequest) -> Clip:
        self.requests.append(request)
        self.contents.append(await asyncio.to_thread(path.read_bytes))
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        if self.error is not None:
            raise self.error
        return clip()


class FakeLauncher:
    """Starts nothing, since fake engines have no workers."""

    def __init__(self, log_format: str) -> None:
        pass

    def start(self) -> None:
        return None

    def close(self) -> None:
        return None
