"""The time per token of a model, as benchmarks measure it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vidspec_models.reference import measure

pytestmark = pytest.mark.unit

SLOW_S, FAST_S = 0.004, 0.002


class Settling:
    """A clock and a model that decodes slowly for 0.25 s, like a thread team that starts with a bad size."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def decode(self, *_: Any) -> list[int]:
        self.now += SLOW_S if self.now < 100.25 else FAST_S
        return [1, 2, 3, 4]


def test_strides_are_timed_until_the_team_has_found_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Settling()
    monkeypatch.setattr(measure, "time", model)
    token_s = measure.time_strides(model, SimpleNamespace(length=0), 10)  # type: ignore[arg-type]
    assert token_s == pytest.approx(FAST_S / 4)


def test_a_model_that_makes_one_token_at_a_time_has_no_strides() -> None:
    alone = SimpleNamespace(decode=lambda *_: [])
    assert measure.time_strides(alone, SimpleNamespace(length=0), 10) is None  # type: ignore[arg-type]
