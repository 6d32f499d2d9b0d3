"""What an answer reports only on request: log probabilities, in OpenAI's shape, and how it was made (`include`).

`include` can ask which model wrote each token, what the draft saw, and when each worker worked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vidspec_models.request import Include, Preservation
from vidspec_service.api.schemas.fields import Number, is_none
from vidspec_service.engine.types import (
    Activity,
    DraftView,
    ExtraEvent,
    Logprob,
    Phase,
    SeenCells,
    TokenLogprob,
    TokenSource,
)

_MAX_SPANS = 10_000  # sent at once


class TopLogprob(BaseModel):
    """A token that was likely at this position."""

    token: str = Field(description="Its text; U+FFFD for bytes that are not a complete character.")
    logprob: float = Field(description="Natural logarithm of its probability, before temperature and penalties.")
    bytes: list[int] = Field(description="Its text in UTF-8.")


class ContentLogprob(TopLogprob):
    """A token of the answer, with its alternatives."""

    top_logprobs: list[TopLogprob] = Field(description="The most likely tokens, best first.")


class ChoiceLogprobs(BaseModel):
    """One for each token of the answer, or of a chunk."""

    content: Iterable[ContentLogprob]  # built one by one as they are written: all at once takes ten times as long
    refusal: None = None


class TokenDetails(BaseModel):
    """A token of the answer."""

    model_config = ConfigDict(from_attributes=True)  # is read from the engine's TokenDetail

    text: str = Field(description="What it adds to the text; nothing while a character is incomplete.")
    source: TokenSource = Field(description="What wrote it: draft, target or grammar.")


class SeenFrame(BaseModel):
    """A frame in the draft's grid of cells."""

    timestamp_s: Number = Field(
        description="When it is shown; if the model merges two frames into one, when the first is shown."
    )
    cells: list[int] = Field(description="Cells that the draft saw: row * columns + column.")


class SeenVideo(BaseModel):
    """One of the request's videos, in their order."""

    rows: int
    columns: int
    frames: list[SeenFrame]


class DraftViewFacts(BaseModel):
    """What the draft saw."""

    preservation: Preservation
    prune_ratio: Number
    videos: list[SeenVideo]


class TimelineSpan(BaseModel):
    """A period of work on the request, in seconds since the same moment as in `timings`."""

    worker: str = Field(description="target or draft.")
    phase: Phase
    start_s: Number
    end_s: Number
    num_tokens: int = Field(description="Tokens of this request: prefilled, verified or proposed.")


class AnswerExtras(BaseModel):
    """What `include` adds to an answer; in a stream, what is new since the last event."""

    draft_view: DraftViewFacts | None = Field(None, exclude_if=is_none, description="Only if `include` asks for it.")
    timeline: list[TimelineSpan] | None = Field(None, exclude_if=is_none, description="Only if `include` asks for it.")


def logprobs_fields(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The fields of a ChoiceLogprobs, with the `offset` of each token; `content` can be read only once."""
    return {
        "content": (
            {"offset": each.offset, **_told(each.token), "top_logprobs": [_told(other) for other in each.top]}
            for each in tokens
        )
    }


def _told(one: Logprob) -> dict[str, Any]:
    return {"token": one.text.decode(errors="replace"), "logprob": one.logprob, "bytes": list(one.text)}


def _seen(cells: SeenCells, times: Sequence[float]) -> dict[str, Any]:
    num_frames, rows, columns = cells.shape
    seen = np.unpackbits(np.frombuffer(cells.bits, np.uint8), bitorder="little", count=num_frames * rows * columns)
    merged = -(-len(times) // num_frames)  # frames of the video that the model merges into one
    return {
        "rows": rows,
        "columns": columns,
        "frames": [
            {"timestamp_s": times[min(index * merged, len(times) - 1)], "cells": np.flatnonzero(frame).tolist()}
            for index, frame in enumerate(seen.reshape(num_frames, -1))
        ],
    }


class ExtrasBuffer:
    """Collects what `include` asks for until it is sent."""

    def __init__(self, include: frozenset[Include], began: float) -> None:
        """`began` is time 0 of the request, on the monotonic clock."""
        self._include = include
        self._began = began
        self._view: DraftView | None = None
        self._work: list[Activity] = []

    def add(self, event: ExtraEvent) -> None:
        """Keep what an event of the engine says."""
        if isinstance(event, DraftView):
            self._view = event
        elif len(self._work) < _MAX_SPANS:
            self._work.append(event)

    def take(self, timestamps_s: Sequence[Sequence[float]]) -> dict[str, Any]:
        """The fields of an AnswerExtras: all that came since the last call. `timestamps_s`: of each video's frames."""
        extras: dict[str, Any] = {}
        if (view := self._view) is not None:
            seen = [_seen(*each) for each in zip(view.videos, timestamps_s, strict=False)]
            extras["draft_view"] = {"preservation": view.preservation, "prune_ratio": view.prune_ratio, "videos": seen}
        if Include.TIMELINE in self._include:
            extras["timeline"] = [self._span(each) for each in self._work]
        self._view, self._work = None, []
        return extras

    def _span(self, work: Activity) -> dict[str, Any]:
        return {
            "worker": work.worker,
            "phase": work.phase,
            "start_s": work.start - self._began,
            "end_s": work.end - self._began,
            "num_tokens": work.num_tokens,
        }
