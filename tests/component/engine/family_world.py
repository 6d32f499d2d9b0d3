"""One family's tiny checkpoints, stock transformers' answers to eight conversations, and engines that serve them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.component.engine.harness import Answer, EngineHarness, collect
from tests.unit.models.families.test_exactness import SIZES, clip
from tests.unit.models.families.tiny_checkpoints import save
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.reference.stock import GREEDY, StockAnswer, StockGenerator
from vidspec_models.request import VIDEO, GenerationRequest, SamplingParams, SpeculationMode, Turn, Video
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.frontend.supervisor import WorkerLauncher
from vidspec_service.engine.ipc.messages import Heartbeat
from vidspec_service.telemetry import Metrics

ANSWER = 40
LONG = 4  # the conversation whose clip has so many cells that a draft sees only a part of them
LIMITS = (40, 7, 23, 40, 12, 31, 40, 17)  # so that requests leave at different times
_JOIN_S = 0.02  # delay between two requests


def video(seed: int, num_frames: int = 4, size: tuple[int, int] = SIZES[0]) -> Video:
    """Frames whose sides are no multiple of a patch."""
    source = clip(seed, num_frames, size)
    return Video(
        frames=source.frames,
        source_indices=source.source_indices,
        source_fps=source.source_fps,
        source_num_frames=source.source_num_frames,
        duration_s=source.duration_s,
    )


def conversations() -> list[tuple[tuple[Turn, ...], tuple[Video, ...]]]:
    """Eight: without a video, with one and with two, in one turn or more, odd numbers of frames, odd sizes."""
    wide = video(12, size=SIZES[1])  # the same number of frames as the other: stock LLaVA stacks them
    once = [(video(1),), (video(2, 5, SIZES[1]),), (video(3, 2, (57, 29)),), (video(4, 19, (57, 85)),)]
    asked = [Turn(role="user", parts=(VIDEO, f"question {i}?" * (i + 1))) for i in range(len(once))]
    said = Turn(role="assistant", parts=("a man",))
    first, second = (Turn(role="user", parts=(VIDEO, text)) for text in ("first", "and this?"))
    return [
        ((Turn(role="user", parts=("hello?",)),), ()),
        *(((each,), videos) for each, videos in zip(asked, once, strict=True)),
        ((Turn(role="user", parts=(VIDEO, VIDEO, "compare")),), (video(11), wide)),
        ((first, said, second), (video(11), wide)),
        ((first, said, Turn(role="user", parts=("why?",))), (wide,)),
    ]


def request(
    mode: SpeculationMode, index: int, name: str = "", max_tokens: int = ANSWER, longer: str = ""
) -> GenerationRequest:
    """Conversation `index`, with `longer` appended to its last turn."""
    messages, videos = conversations()[index]
    last = replace(messages[-1], parts=(*messages[-1].parts[:-1], f"{messages[-1].parts[-1]}{longer}"))
    return GenerationRequest(
        request_id=f"{mode}-{index}-{name}",
        turns=(*messages[:-1], last),
        videos=videos,
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        speculation=mode,
        stop=(),
    )


@dataclass(frozen=True)
class FamilyWorld:
    """The pair's folder and the reference. The draft's vocabulary has more padding rows, which could win."""

    folder: Path
    stock: StockGenerator

    @classmethod
    def oracle(cls, name: str, folder: Path, num_words: int) -> FamilyWorld:
        """A pair whose draft is the target, with a vocabulary as large as in released models."""
        save(name, folder / "target", num_words=num_words)
        (folder / "draft").symlink_to(folder / "target")
        return cls._of(folder)

    @classmethod
    def make(cls, name: str, folder: Path) -> FamilyWorld:
        save(name, folder / "target")
        save(name, folder / "draft", noise=0.02, loud_padding=True)
        return cls._of(folder)

    @classmethod
    def _of(cls, folder: Path) -> FamilyWorld:
        path = str(folder / "target")
        return cls(folder, StockGenerator(ModelSpec(path=path, role="target", device="cpu", dtype="float32")))

    def wanted(self, asked: GenerationRequest) -> StockAnswer:
        """The answer of `generate`."""
        assert asked.max_tokens is not None
        return self.stock.answer(asked.turns, asked.videos, asked.max_tokens, GREEDY, min_tokens=asked.min_tokens)

    @contextmanager
    def engine(self, **settings: Any) -> Iterator[TracedHarness]:
        target, draft = (
            WorkerConfig(model=str(self.folder / role), dtype="float32", device="cpu") for role in ("target", "draft")
        )
        harness = TracedHarness(EngineConfig(target=target, draft=draft, **settings), Traced)
        try:
            yield harness
        finally:
            harness.close()


class Traced(LocalEngine):
    """Counts the rows of the target's forwards."""

    def __init__(self, config: EngineConfig, metrics: Metrics, *, launcher: WorkerLauncher) -> None:
        super().__init__(config, metrics, self._note, launcher=launcher)
        self.target_rows = 0

    def _note(self, role: str, heartbeat: Heartbeat) -> None:
        if role == "target":
            self.target_rows += sum(rows for _, _, rows in heartbeat.forwards)


class TracedHarness(EngineHarness):
    """An engine whose requests can come one after the other while others run."""

    def joined(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Send each request a little later than the one before."""

        async def one(index: int, asked: GenerationRequest) -> Answer:
            await asyncio.sleep(_JOIN_S * index)
            return await collect(self.engine, asked)

        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*(one(index, asked) for index, asked in enumerate(requests)))

        waited: Coroutine[Any, Any, list[Answer]] = all_of_them()
        return self.run(waited)

    def target_rows(self) -> int:
        """Rows of all forwards so far, from the target's heartbeat."""
        assert isinstance(self.engine, Traced)
        self.run(asyncio.sleep(2.5))  # heartbeats come once a second
        return self.engine.target_rows
