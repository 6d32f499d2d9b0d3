"""What the API and its fakes agree an engine is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from vidspec_service.engine.types import EngineInfo, EngineStatus, GenerationEvent, GenerationRequest


class Engine(Protocol):
    """Turns requests into event streams; started and closed by its owner."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded models; raises EngineDead before the first worker is ready."""
        ...

    def status(self) -> EngineStatus:
        """The workers' states and the load, without waiting."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield Started, then TextDelta events, then Finished.

        Closing the generator early cancels the request on every worker. Raises, before or instead of
        Finished: ContextLengthExceeded, QueueFull, InvalidRequest, GenerationFailed, EngineDead.
        """
        ...
