"""Work that a server repeats in the background."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.api.limits.test_deadline import run
from vidspec_service.api.limits.deadline import background_task
from vidspec_service.api.server import repeatedly
from vidspec_service.errors import CapacityError


@pytest.mark.parametrize("error", [OSError("the disk is gone"), CapacityError("the store is gone")])
def test_background_work_that_fails_is_logged_and_done_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    done_at = list[float]()

    async def work() -> None:
        done_at.append(asyncio.get_running_loop().time())
        raise error

    async def scenario() -> None:
        async with background_task(repeatedly(work, 60.0)):
            await asyncio.sleep(150)

    run(scenario())
    assert done_at == [60.0, 120.0]
    assert caplog.text.count(str(error)) == 2
