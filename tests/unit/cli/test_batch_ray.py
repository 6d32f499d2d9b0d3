"""`vidspec batch` on a Ray cluster, without one."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from vidspec_service.cli import batch_ray
from vidspec_service.cli.batch_client import ClientOptions
from vidspec_service.cli.batch_files import BatchRequest
from vidspec_service.end_signals import END_SIGNALS
from vidspec_service.settings import ClusterSettings

OPTIONS = ClientOptions(timeout_s=1.0, patience_s=1.0, api_key=None, folder=Path(), at_once=1)


@pytest.fixture(autouse=True)
def _joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the cluster had been joined: Ray has a handler of its own for SIGTERM."""
    before = {each: signal.getsignal(each) for each in END_SIGNALS}
    monkeypatch.setattr(batch_ray, "join_cluster", lambda *_, **__: signal.signal(signal.SIGTERM, lambda *_: None))
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_signal_ends_a_run_without_a_stack_of_rays() -> None:
    def lines() -> Iterator[BatchRequest]:
        signal.raise_signal(signal.SIGTERM)
        yield from ()

    with pytest.raises(KeyboardInterrupt):
        batch_ray.send_all(lines(), lambda _: None, ClusterSettings(), OPTIONS)


def test_what_ray_says_to_programmers_is_not_told_to_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def map_batches(*_: object, **__: Any) -> SimpleNamespace:
        warnings.warn("`ray_remote_args` is deprecated", stacklevel=2)
        return SimpleNamespace(iter_rows=list[NoReturn])

    monkeypatch.setattr("ray.data.from_arrow_refs", lambda _: SimpleNamespace(map_batches=map_batches))
    batch_ray.send_all([], lambda _: None, ClusterSettings(), OPTIONS)
