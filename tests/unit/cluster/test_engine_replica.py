"""The actor that holds an engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cluster.test_batches import PROMPT_READY
from vidspec_models.request import GenerationRequest
from vidspec_service.cluster.engine_replica import EngineReplica
from vidspec_service.engine.types import GenerationEvent
from vidspec_service.errors import EngineDead


def test_an_engine_without_a_target_ends_so_that_ray_asks_another_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it lived on, each of its requests came back to it and was refused as one that ends engines."""

    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    async def dies(_: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        yield PROMPT_READY
        raise EngineDead("the target worker ended 5 times in a row")

    async def hear() -> None:
        # No instance of its own: it could not be deleted outside Ray.
        replica: Any = SimpleNamespace(_engine=SimpleNamespace(generate=dies), _numerics="n")
        async for batch in EngineReplica.generate(replica, GenerationRequest(request_id="r", turns=(), videos=()), ()):
            heard.extend(batch)

    monkeypatch.setattr(os, "_exit", end)
    heard: list[object] = []
    with pytest.raises(Ended, match="1"):
        asyncio.run(hear())
    assert PROMPT_READY in heard
