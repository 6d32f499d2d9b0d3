"""Every error a caller, a file or a configuration can cause; no HTTP status in here (`api/errors.py` maps them)."""

from __future__ import annotations


class ServiceError(Exception):
    """Base of all errors. `code` is the stable string clients match on; `param` names the offending field."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(ServiceError):
    """The caller can fix it by changing the request."""

    code = "invalid_request"


class InvalidRequest(RequestError):
    """A field is missing, malformed, contradictory or unknown."""


class NotFound(RequestError):
    """The named model or video does not exist here."""

    code = "not_found"


class ContextLengthExceeded(RequestError):
    """Prompt, video and max_tokens together exceed the model's context."""

    code = "context_length_exceeded"


class VideoError(RequestError):
    """Something is wrong with the video itself."""


class VideoUnsupported(VideoError):
    """The bytes are not a video in a container and codec we decode."""

    code = "video_unsupported"


class VideoUnreadable(VideoError):
    """A video, but no frame can be read from it: corrupt, or without a video stream."""

    code = "video_unreadable"


class DecoderLost(VideoUnreadable):
    """The decoder died or took too long, which need not be the video's fault."""


class VideoTooLarge(VideoError):
    """Over a limit on bytes, duration, pixels or frames; the message names the limit."""

    code = "video_too_large"


class CapacityError(ServiceError):
    """Nothing is wrong with the request; try again in `retry_after_s` seconds, more than 0."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(CapacityError):
    """All permits, or all bytes for uploads, are taken."""

    code = "queue_full"


class Draining(CapacityError):
    """The server is shutting down and admits nothing new."""

    code = "draining"


class DeadlineExceeded(ServiceError):
    """Queue, decode, prefill and generation together took longer than allowed."""

    code = "deadline_exceeded"


class EngineError(ServiceError):
    """The engine failed, not the caller."""


class GenerationFailed(EngineError):
    """This request failed inside a worker; others are unaffected."""

    code = "generation_failed"


class EngineDead(EngineError):
    """There is no target yet, or none can be brought back: no request can be served."""

    code = "engine_dead"


class ConfigError(ServiceError):
    """A setting, model folder or device does not work; raised before serving starts; the process exits with code 2."""
