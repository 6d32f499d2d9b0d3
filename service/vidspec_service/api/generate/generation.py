"""One request from its slot to its last token: its frames, engine stream, timings and outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from vidspec_models.request import GenerationRequest, Include
from vidspec_service.api.generate.observing import AnswerClock, Tellings
from vidspec_service.api.limits.deadline import Deadline
from vidspec_service.api.schemas.dialects import SpokenChoice
from vidspec_service.api.schemas.tellings import logprobs_of
from vidspec_service.api.services import Services
from vidspec_service.api.store.clips import VideoFile
from vidspec_service.api.uploads.upload import Upload
from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.engine.types import (
    Accepted,
    Activity,
    Finished,
    GenerationEvent,
    Phase,
    SpeculationStats,
    TextDelta,
)
from vidspec_service.errors import GenerationFailed
from vidspec_service.telemetry import RequestTrace

_log = logging.getLogger(__name__)
T = TypeVar("T")


def as_made_for(services: Services, frames: FrameRequest) -> FrameRequest:
    """`frames`, limited to the number of frames that the model was made for; raises EngineDead."""
    most = services.engine.info.max_frames
    return frames if most is None else replace(frames, max_frames=min(frames.max_frames or most, most))


class Generation:
    """Run `start`, then read `pieces` to the end, then ask for `facts`. `close` cancels what still runs.

    Its clock starts when it is built: after the last byte of the request's body.
    """

    def __init__(
        self, services: Services, request: GenerationRequest, deadline: Deadline, trace: RequestTrace | None = None
    ) -> None:
        model = services.engine.info.model
        self.head = {"id": request.request_id, "created": int(time.time()), "model": model}
        self._services = services
        self._metrics = services.metrics
        self._request = request
        self._deadline = deadline
        self._held = AsyncExitStack()
        self._events: AsyncGenerator[GenerationEvent, None] | None = None
        self._videos: list[dict[str, Any]] = []  # not the clips: their frames are large, and the engine has them
        self._accepted: Accepted | None = None
        self._outcome = "abort"
        self._began = time.monotonic()
        self._answers = [AnswerClock(services.metrics, self._began) for _ in range(request.n)]
        self._tellings = Tellings(request.include, self._began) if request.include else None
        self._queue_s = self._decode_s = 0.0
        self._trace = trace

    @property
    def n(self) -> int:
        """How many answers were asked for."""
        return self._request.n

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response: with the seed, a client that lost an answer gets the text again, from any server."""
        return {"x-seed": str(self._request.sampling.seed)}

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a part of this request under its deadline, and remember how it ended."""
        try:
            return await self._deadline.run(work)
        except ClientDisconnect:
            raise
        except Exception:
            self._outcome = "error"
            raise

    async def start(self, upload: Upload, files: Sequence[VideoFile], frames: FrameRequest) -> None:
        """Decode and submit; returns once the engine has accepted, so that a refusal comes before the response."""
        services, caller = self._services, upload.permit.caller
        await services.queue.acquire(caller, self.n)
        self._held.callback(services.queue.release, caller, self.n)
        self._queue_s = time.monotonic() - self._began
        clips = await services.clips.of_all(caller, files, as_made_for(services, frames))
        self._decode_s = time.monotonic() - self._began - self._queue_s
        self._videos = [
            {
                "id": file.content_id,
                "duration_s": clip.video.duration_s,
                "num_frames": len(clip.timestamps_s),
                "timestamps_s": clip.timestamps_s,
                "warnings": clip.warnings,
            }
            for file, clip in zip(files, clips, strict=True)
        ]
        request = self._request
        if self._trace is not None:
            request = replace(request, include=request.include | {Include.TIMELINE})
        upload.close()  # frees the body and its files now, as generating takes longer than decoding
        videos = tuple(clip.video for clip in clips)
        self._events = services.engine.generate(replace(request, caller=caller, videos=videos))
        del clips
        self._held.push_async_callback(self._events.aclose)
        upload.permit.is_in_engine = True
        first = await anext(self._events, None)
        if not isinstance(first, Accepted):
            raise GenerationFailed(f"the engine's stream began with {first!r} instead of Accepted")
        self._accepted = first
        metrics = self._metrics
        metrics.prefix_cache_queries.inc(first.prompt_tokens)
        metrics.prefix_cache_hits.inc(first.cached_tokens)
        metrics.prompt_tokens.inc(first.prompt_tokens)
        metrics.request_prompt_tokens.observe(first.prompt_tokens)
        metrics.video_tokens.observe(first.video_tokens)

    def about(self, pieces: Sequence[TextDelta]) -> dict[str, Any]:
        """What the request asks for about the tokens of these pieces: `logprobs`, `token_details`."""
        found: dict[str, Any] = {}
        if self._request.logprobs is not None:
            found["logprobs"] = logprobs_of(each for piece in pieces for each in piece.logprobs)
        if Include.TOKEN_DETAILS in self._request.include:
            found["token_details"] = [each for piece in pieces for each in piece.details]
        return found

    def news(self) -> dict[str, Any]:
        """What `include` asks for and has not been sent yet, as the fields of a `Told`."""
        return self._tellings.take([video["timestamps_s"] for video in self._videos]) if self._tellings else {}

    async def pieces(self) -> AsyncGenerator[TextDelta | Finished, None]:
        """Each answer's text and what is asked for about its tokens, as committed, then its end; no empty pieces."""
        if self._events is None:
            raise RuntimeError("start() comes first")
        async for event in self._events:
            if isinstance(event, Activity) and self._trace is not None:
                step = "prefill" if event.phase is Phase.PREPARE else event.phase.value
                self._trace.step(step, event.start, event.end, worker=event.worker, num_tokens=event.num_tokens)
            if isinstance(event, TextDelta):
                self._answers[event.choice].count(event.num_tokens)
                if event.text or event.logprobs or event.details:
                    yield event
            elif isinstance(event, Finished):
                self._answers[event.choice].end(event, self._queue_s)
                if self._is_complete:
                    self._outcome = event.finish_reason.value
                yield event
            elif self._tellings is not None and not isinstance(event, Accepted):
                self._tellings.add(event)
        if not self._is_complete:
            raise GenerationFailed("the engine's stream ended without Finished")

    async def spoken(self) -> list[SpokenChoice]:
        """The complete answers, for a response that is not streamed."""
        said: list[list[TextDelta]] = [[] for _ in range(self.n)]
        reasons: dict[int, str] = {}
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Finished):
                    reasons[piece.choice] = piece.finish_reason.value
                else:
                    said[piece.choice].append(piece)
        return [
            SpokenChoice(
                about=self.about(pieces),
                pieces=[(piece.text, self.about([piece])) for piece in pieces],
                finish_reason=reasons[index],
            )
            for index, pieces in enumerate(said)
        ]

    def facts(self) -> dict[str, Any]:
        """What a complete answer says besides its text: usage, video, speculation, timings."""
        accepted, ended = self._accepted, [answer.finished for answer in self._answers if answer.finished is not None]
        if accepted is None or len(ended) < self.n:
            raise RuntimeError("the answer is not complete")
        stats = SpeculationStats.of_all([finished.speculation for finished in ended])
        completion_tokens = sum(finished.completion_tokens for finished in ended)
        first_s = min(answer.first for answer in self._answers) - self._began
        return {
            "usage": {
                "prompt_tokens": accepted.prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": accepted.prompt_tokens + completion_tokens,
                "prompt_tokens_details": {
                    "video_tokens": accepted.video_tokens,
                    "cached_tokens": accepted.cached_tokens,
                },
                "completion_tokens_details": {
                    "accepted_prediction_tokens": stats.num_accepted_tokens,
                    "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
                },
            },
            "video": self._videos[0] if len(self._videos) == 1 else None,
            "videos": self._videos,
            "speculation": stats,
            "timings": {
                "queue_s": self._queue_s + ended[0].queue_s,
                "decode_s": self._decode_s,
                "prefill_s": ended[0].prefill_s,
                "time_to_first_token_s": first_s,
                "time_per_output_token_s": fmean(answer.per_token_s for answer in self._answers),
            },
        }

    async def close(self) -> None:
        """Cancel the request on every worker, unless it has ended, and release its slots."""
        await self._held.aclose()
        facts = self.facts() if self._is_complete else {}
        if self._trace is not None:
            self._record(self._trace, facts)
        if self._accepted is None:
            return
        seconds = time.monotonic() - self._began
        self._metrics.request_success.labels(self._outcome).inc()
        self._metrics.e2e_request_latency.observe(seconds)
        told: dict[str, Any] = {
            "id": self._request.request_id,
            "outcome": self._outcome,
            "prompt_tokens": self._accepted.prompt_tokens,
        }
        if begun := [answer.first for answer in self._answers if answer.num_tokens]:
            told["first_token_s"] = round(min(begun) - self._began, 4)
        if facts:
            told |= {
                "completion_tokens": facts["usage"]["completion_tokens"],
                "queue_s": round(facts["timings"]["queue_s"], 4),
                "mode": facts["speculation"].mode.value,
                "acceptance_rate": round(facts["speculation"].acceptance_rate, 4),
            }
        _log.info("request ended", extra={**told, "duration_s": round(seconds, 4)})

    def _record(self, trace: RequestTrace, facts: dict[str, Any]) -> None:
        """Record the request in its trace, with vLLM's names; `facts` are empty unless its answers are complete."""
        now, from_queue = time.monotonic(), self._began + self._queue_s
        trace.step("admit", trace.began, from_queue)
        if self._events is not None:
            submitted = from_queue + self._decode_s
            trace.step("decode", from_queue, submitted, num_frames=sum(video["num_frames"] for video in self._videos))
            if self._accepted is not None:
                trace.step("submit", submitted, submitted + self._accepted.queue_s)
        begun = [answer for answer in self._answers if answer.num_tokens]
        first, last = min((each.first for each in begun), default=now), max((each.last for each in begun), default=now)
        if begun:
            trace.step("commit", first, first, worker="target", num_tokens=sum(each.num_tokens for each in begun))
            trace.step("commit", last, last, worker="target")
            trace.step("stream", first, now)
        request, usage, timings = self._request, facts.get("usage", {}), facts.get("timings", {})
        trace.tell(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.id": request.request_id,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.request.top_p": request.sampling.top_p,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.n": request.n,
                "gen_ai.response.model": str(self.head["model"]),
                "gen_ai.usage.prompt_tokens": usage.get("prompt_tokens"),
                "gen_ai.usage.completion_tokens": usage.get("completion_tokens"),
                "gen_ai.latency.time_in_queue": timings.get("queue_s"),
                "gen_ai.latency.time_to_first_token": timings.get("time_to_first_token_s"),
                "gen_ai.latency.time_in_model_prefill": timings.get("prefill_s"),
                "gen_ai.latency.time_in_model_decode": last - first,
                "gen_ai.latency.e2e": now - trace.began,
                "vidspec.speculation": str(request.speculation),
                "vidspec.compression": str(request.compression),
                "vidspec.outcome": self._outcome,
            }
        )
        if self._outcome == "error":
            trace.fail("the engine gave no answer")

    @property
    def _is_complete(self) -> bool:
        return all(answer.finished is not None for answer in self._answers)
