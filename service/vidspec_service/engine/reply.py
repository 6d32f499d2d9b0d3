"""One request's messages from the target as the events its caller reads: detokenised, counted, ended once."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from vidspec_service.engine.detokenizer import Detokenizer
from vidspec_service.engine.inflight import Pending
from vidspec_service.engine.messages import Accepted, Ended, Rejected, Tokens
from vidspec_service.engine.progress import GenerationProgress
from vidspec_service.engine.types import FinishReason, GenerationEvent, SpeculationMode, Started, TextDelta
from vidspec_service.errors import ContextLengthExceeded, EngineError, GenerationFailed, ServiceError

REJECTIONS: dict[str, type[ServiceError]] = {
    "context_length": ContextLengthExceeded,
    "failed": GenerationFailed,
}


async def replies(pending: Pending, detokenizer: Detokenizer) -> AsyncGenerator[GenerationEvent, None]:
    """Started, TextDelta events, Finished; raises what the target or the engine refused it with."""
    progress = GenerationProgress(SpeculationMode(pending.message.speculation))
    while True:
        event = await pending.events.get()
        match event:
            case Accepted():
                progress.accepted(event)
                yield Started(
                    prompt_tokens=event.prompt_tokens,
                    video_tokens=event.video_tokens,
                    cached_tokens=event.cached_tokens,
                )
            case Rejected():
                raise REJECTIONS.get(event.kind, GenerationFailed)(event.message)
            case Tokens():
                progress.committed(event)
                before = detokenizer.num_tokens
                text = detokenizer.push(event.ids)
                num_tokens = detokenizer.num_tokens - before
                yield TextDelta(text=text, num_tokens=num_tokens, ids=event.ids[:num_tokens])
                if detokenizer.is_stopped:
                    yield progress.finished(FinishReason.STOP, detokenizer.num_tokens)
                    return
            case Ended():
                rest = detokenizer.finish()
                if rest:
                    yield TextDelta(text=rest, num_tokens=0)
                # The rest may hold a stop string that only the last tokens completed.
                reason = FinishReason.STOP if detokenizer.is_stopped else FinishReason(event.finish_reason)
                yield progress.finished(reason, detokenizer.num_tokens)
                return
            case EngineError():
                raise event
