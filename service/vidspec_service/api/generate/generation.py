"""One request from its slots to its last token: its frames, engine streams, timings and outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from vidspec_models.request import GenerationRequest, Include, Reasoning
from vidspec_service.api.generate.stats import AnswerStats, trace_answers
from vidspec_service.api.limits.deadline import Deadline
from vidspec_service.api.schemas.dialects import FullChoice
from vidspec_service.api.schemas.extras import ExtrasBuffer, logprobs_fields
from vidspec_service.api.schemas.fields import VideoFile
from vidspec_service.api.services import Services
from vidspec_service.api.uploads.upload import Upload
from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.engine.frontend.merge_streams import merge_streams
from vidspec_service.engine.types import (
    Activity,
    Finished,
    GenerationEvent,
    Phase,
    PromptReady,
    SpeculationStats,
    TextDelta,
)
from vidspec_service.errors import GenerationFailed
from vidspec_service.telemetry import RequestTrace

_log = logging.getLogger(__name__)
T = TypeVar("T")


def limit_to_model(services: Services, frames: FrameRequest) -> FrameRequest:
    """`frames`, limited to the number of frames that the model was made for; raises EngineDead."""
    most = services.engine.info.max_frames
    return frames if most is None else replace(frames, max_frames=min(frames.max_frames or most, most))


class Generation:
    """Run `start`, then read `pieces` to the end, then ask for `facts`. `close` cancels what still runs.

    Its clock starts when it is built: after the last byte of the request's body.
    """

    _events: AsyncGenerator[GenerationEvent, None]

    def __init__(
        self,
        services: Services,
        name: str,
        requests: Sequence[GenerationRequest],
        deadline: Deadline,
        trace: RequestTrace | None,
    ) -> None:
        """`requests` are one for each prompt, which differ in prompt, seed and id only."""
        self.head = {"id": name, "created": int(time.time()), "model": services.engine.info.model}
        self._services = services
        self._metrics = services.metrics
        self._requests = requests
        self._deadline = deadline
        self._held = AsyncExitStack()
        self._videos: list[dict[str, Any]] = []  # not the clips: their frames are large, and the engine has them
        self._accepted: list[PromptReady] = []  # the first one of each prompt
        self._outcome = "abort"
        self._began = time.monotonic()
        # One for each answer; those to the first prompt come first.
        self._answers = [AnswerStats(services.metrics, self._began) for each in requests for _ in range(each.n)]
        self._include, self._logprobs = requests[0].include, requests[0].logprobs
        self._extras = ExtrasBuffer(self._include, self._began) if self._include else None
        # One prompt at a time waits for slots, so that other requests get some in between.
        self._queue_lock = asyncio.Lock()
        self._decode_s = 0.0
        self._trace = trace

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response: with the seed, a client that lost an answer gets the text again, from any server."""
        return {"x-seed": str(self._requests[0].sampling.seed)}

    @property
    def reasoning(self) -> Reasoning:
        """How the answers tell what the model thinks; known once a prompt was accepted."""
        return self._accepted[0].reasoning

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a part of this request under its deadline, and remember how it ended."""
        try:
            return await self._deadline.run(work)
        except ClientDisconnect:
            raise
        except Exception as error:
            self._outcome = "error"
            if self._trace is not None:  # here, as a stream's response does not raise it
                self._trace.ended_by(error)
            raise

    async def start(self, upload: Upload, files: Sequence[VideoFile], frames: FrameRequest) -> None:
        """Decode and submit. Returns when the engine has accepted a prompt: a refusal must come before the response."""
        streams = [self._prompt_events(index, upload, files, frames) for index in range(len(self._requests))]
        self._events = streams[0] if len(streams) == 1 else merge_streams(streams)
        self._held.push_async_callback(self._events.aclose)
        await anext(self._events)

    async def _prompt_events(
        self, index: int, upload: Upload, files: Sequence[VideoFile], frames: FrameRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The engine's events for one prompt, from PromptReady on, with `choice` counted over all prompts."""
        services, permit, request = self._services, upload.permit, self._requests[index]
        num_before = index * request.n
        async with AsyncExitStack() as held:
            async with self._queue_lock:
                await services.queue.acquire(permit.caller, request.n)
            held.callback(services.queue.release, permit.caller, request.n)
            from_queue = time.monotonic()
            for answer in self._answers[num_before : num_before + request.n]:
                answer.queue_s = from_queue - self._began
            shown = limit_to_model(services, frames)
            clips = await services.clips.get_all(permit.caller, files, shown)
            submitted = time.monotonic()
            self._decode_s = submitted - from_queue
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
            if self._trace is not None:
                num_frames = sum(video["num_frames"] for video in self._videos)
                self._trace.add_step("admit", self._began, from_queue)
                self._trace.add_step("decode", from_queue, submitted, num_frames=num_frames)
                request = replace(request, include=request.include | {Include.TIMELINE})
            upload.close()  # frees the body and its files now, as generating takes longer than decoding
            videos = tuple(clip.video for clip in clips)
            events = services.engine.generate(replace(request, caller=permit.caller, videos=videos))
            del clips, videos
            held.push_async_callback(events.aclose)
            permit.num_in_engine += request.n
            first = await anext(events)
            assert isinstance(first, PromptReady)
            self._accept(first, submitted)
            yield first
            async for event in events:
                if isinstance(event, Finished) and event.choice == 0:
                    self._metrics.prefix_cache_queries.inc(first.prompt_tokens)
                    self._metrics.prefix_cache_hits.inc(event.cached_tokens)
                if isinstance(event, TextDelta | Finished) and index:
                    event = replace(event, choice=num_before + event.choice)
                yield event

    def _accept(self, first: PromptReady, submitted: float) -> None:
        """The target has taken up a prompt, which was submitted to the engine at `submitted`."""
        self._accepted.append(first)
        if self._trace is not None:
            self._trace.add_step("submit", submitted, submitted + first.queue_s)
        metrics = self._metrics
        metrics.prompt_tokens.inc(first.prompt_tokens)
        metrics.request_prompt_tokens.observe(first.prompt_tokens)
        metrics.video_tokens.observe(first.video_tokens)

    def token_info(self, pieces: Sequence[TextDelta]) -> dict[str, Any]:
        """What the request asks for about the tokens of these pieces: `logprobs`, `token_details`."""
        found: dict[str, Any] = {}
        if self._logprobs is not None:
            found["logprobs"] = logprobs_fields(each for piece in pieces for each in piece.logprobs)
        if Include.TOKEN_DETAILS in self._include:
            found["token_details"] = [each for piece in pieces for each in piece.details]
        return found

    def take_extras(self) -> dict[str, Any]:
        """What `include` asks for and has not been sent yet, as the fields of an AnswerExtras."""
        return self._extras.take([video["timestamps_s"] for video in self._videos]) if self._extras else {}

    async def pieces(self) -> AsyncGenerator[TextDelta | Finished, None]:
        """Each answer's text and what is asked for about its tokens, as committed, then its end; no empty pieces."""
        async for event in self._events:
            if isinstance(event, Activity) and self._trace is not None:
                step = "prefill" if event.phase is Phase.PREPARE else event.phase.value
                self._trace.add_step(step, event.start, event.end, worker=event.worker, num_tokens=event.num_tokens)
            if isinstance(event, TextDelta):
                self._answers[event.choice].add_tokens(event.num_tokens)
                if event.text or event.logprobs or event.details:
                    yield event
            elif isinstance(event, Finished):
                self._answers[event.choice].finish(event)
                if self._is_complete:
                    self._outcome = event.finish_reason.value
                yield event
            elif self._extras is not None and not isinstance(event, PromptReady):
                self._extras.add(event)
        if not self._is_complete:
            raise GenerationFailed("the engine's stream ended without Finished")

    async def collect(self) -> list[FullChoice]:
        """The complete answers, for a response that is not streamed."""
        texts: list[list[TextDelta]] = [[] for _ in self._answers]
        reasons: dict[int, str] = {}
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Finished):
                    reasons[piece.choice] = piece.finish_reason.value
                else:
                    texts[piece.choice].append(piece)
        return [
            FullChoice(pieces, self.token_info, reasons[index], self.reasoning) for index, pieces in enumerate(texts)
        ]

    def facts(self) -> dict[str, Any]:
        """What a complete answer says besides its text: usage, video, speculation, timings."""
        accepted, ended = self._accepted, [answer.finished for answer in self._answers if answer.finished is not None]
        stats = SpeculationStats.of_all([finished.speculation for finished in ended])
        prompt_tokens = sum(each.prompt_tokens for each in accepted)
        completion_tokens = sum(finished.completion_tokens for finished in ended)
        first_s = min(answer.first_token_at for answer in self._answers) - self._began
        return {
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "prompt_tokens_details": {
                    "video_tokens": sum(each.video_tokens for each in accepted),
                    "cached_tokens": sum(each.cached_tokens for each in ended[:: self._requests[0].n]),
                },
                "completion_tokens_details": {
                    "reasoning_tokens": sum(finished.reasoning_tokens for finished in ended),
                    "accepted_prediction_tokens": stats.num_accepted_tokens,
                    "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
                },
            },
            "video": self._videos[0] if len(self._videos) == 1 else None,
            "videos": self._videos,
            "speculation": stats,
            "timings": {
                "queue_s": self._answers[0].queue_s,
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
            trace_answers(self._trace, self._requests[0], self.head, self._answers, self._outcome, facts)
        if not self._accepted:
            return
        seconds = time.monotonic() - self._began
        self._metrics.request_success.labels(self._outcome).inc()
        self._metrics.e2e_request_latency.observe(seconds)
        logged: dict[str, Any] = {
            "id": self.head["id"],
            "outcome": self._outcome,
            "prompt_tokens": sum(each.prompt_tokens for each in self._accepted),
        }
        if begun := [answer.first_token_at for answer in self._answers if answer.num_tokens]:
            logged["first_token_s"] = round(min(begun) - self._began, 4)
        if facts:
            logged |= {
                "completion_tokens": facts["usage"]["completion_tokens"],
                "queue_s": round(facts["timings"]["queue_s"], 4),
                "mode": facts["speculation"].mode.value,
                "acceptance_rate": round(facts["speculation"].acceptance_rate, 4),
            }
        _log.info("request ended", extra={**logged, "duration_s": round(seconds, 4)})

    @property
    def _is_complete(self) -> bool:
        return all(answer.finished is not None for answer in self._answers)
