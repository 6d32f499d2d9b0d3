"""What the answers to errors tell."""

from __future__ import annotations

import pytest

from vidspec_service.api.errors import TooManyRequests, error_response


@pytest.mark.parametrize(("wait_s", "told"), [(0.001, "1"), (1.0, "1"), (1.001, "2")])
def test_who_comes_back_when_told_does_not_come_too_early(wait_s: float, told: str) -> None:
    assert error_response(TooManyRequests("Wait.", retry_after_s=wait_s)).headers["retry-after"] == told
