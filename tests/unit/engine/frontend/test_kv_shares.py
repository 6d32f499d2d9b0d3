"""KV budgets are granted together once all workers that ask have loaded; a restarted worker gets the same budget."""

from __future__ import annotations

import pytest

from tests.unit.engine.test_kv_budget import on, worker
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.frontend.kv_shares import KVShares
from vidspec_service.errors import ConfigError

CONFIG = EngineConfig(target=WorkerConfig(model="bundled"), gpu_memory_utilization=0.9, kv_cache_tokens=5000)
TARGET, DRAFT = worker(context=4000, at=1.0), worker(on(weights=1.0, token=8.0), context=4000, at=2.0)


class Waiting:
    """Records what it is granted."""

    def __init__(self) -> None:
        self.granted: list[int] = []

    def grant(self, num_tokens: int) -> None:
        self.granted.append(num_tokens)


@pytest.fixture
def workers() -> dict[str, Waiting]:
    return {"target": Waiting(), "draft": Waiting()}


def test_nobody_is_answered_before_both_have_loaded(workers: dict[str, Waiting]) -> None:
    shares = KVShares(CONFIG, workers)
    shares.measured("target", TARGET)
    assert workers["target"].granted == []
    shares.measured("draft", DRAFT)
    assert workers["target"].granted == workers["draft"].granted == [5000]


def test_a_draft_on_the_cpu_is_not_waited_for_once_it_is_ready(workers: dict[str, Waiting]) -> None:
    shares = KVShares(CONFIG, workers)
    shares.measured("target", TARGET)
    shares.ready("draft")
    assert (workers["target"].granted, workers["draft"].granted) == ([5000], [])


def test_workers_on_the_cpu_are_told_nothing(workers: dict[str, Waiting]) -> None:
    shares = KVShares(CONFIG, workers)
    for role in workers:
        shares.ready(role)
    assert workers["target"].granted == workers["draft"].granted == []


def test_a_worker_that_comes_back_gets_what_it_had_whatever_is_free_now(workers: dict[str, Waiting]) -> None:
    shares = KVShares(CONFIG, workers)
    shares.measured("target", TARGET)
    shares.measured("draft", DRAFT)
    for role in workers:
        shares.ready(role)
    shares.measured("target", worker(on(free=0.0), context=4000))
    assert workers["target"].granted == [5000, 5000]
    assert workers["draft"].granted == [5000]


def test_what_does_not_fit_is_refused(workers: dict[str, Waiting]) -> None:
    shares = KVShares(CONFIG, {"target": workers["target"]})
    with pytest.raises(ConfigError, match="no room for one context"):
        shares.measured("target", worker(on(free=1.0)))
    assert workers["target"].granted == []
