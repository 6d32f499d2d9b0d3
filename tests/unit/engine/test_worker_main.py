"""A worker process before it is ready: settings of its libraries, and its share of a CUDA device."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
from msgspec import structs

from tests.unit.engine.counting_model import configure
from vidspec_service.engine import worker_main
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, ChannelFull
from vidspec_service.engine.ipc.messages import Cancel, KVBudget, Loaded
from vidspec_service.engine.kv_budget import WorkerMemory
from vidspec_service.engine.worker_main import _with_kv_budget, import_libraries

MEMORY = WorkerMemory(context=500, measured_at=0.0, devices=())


def test_the_budget_that_is_granted_is_the_size_of_its_cache() -> None:
    near, far = Channel.pair()
    far.send(KVBudget(num_tokens=12345))
    config = _with_kv_budget(near, configure("target"), MEMORY)
    assert config.engine.kv_cache_tokens == 12345
    received = far.receive()
    assert received is not None
    assert received[0] == Loaded(memory=MEMORY)
    near.close()
    far.close()


def test_without_an_answer_it_ends_instead_of_guessing() -> None:
    near, far = Channel.pair()
    started = configure("target")
    impatient = structs.replace(started, engine=dataclasses.replace(started.engine, start_timeout_s=0.01))
    with pytest.raises(ChannelClosed, match="no KVBudget came"):
        _with_kv_budget(near, impatient, MEMORY)
    far.send(Cancel(request_id="r"))
    with pytest.raises(ChannelClosed, match="no KVBudget came"):
        _with_kv_budget(near, impatient, MEMORY)
    near.close()
    far.close()


@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, "10000"), ({"GOMP_SPINCOUNT": "0"}, "0")], ids=["by us", "by the operator"]
)
def test_torchs_threads_give_a_core_back_soon(
    chosen: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment := dict(chosen))
    monkeypatch.setattr("vidspec_models.backends.select.import_kernels", lambda: None)
    import_libraries()
    assert environment["GOMP_SPINCOUNT"] == expected


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ChannelFull("full"), "has not read for 10 s"),
        (ZeroDivisionError("of our own"), "ZeroDivisionError: of our own"),
    ],
)
def test_whatever_ends_a_worker_is_told_and_it_exits_at_once(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def serve(*_: object) -> int:
        raise error

    monkeypatch.setattr(worker_main, "_serve", serve)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker_main, "_PR_SET_NAME", 0)  # these three are the process's own, which is the tests'
    for name in ("give_way", "configure_logging"):
        monkeypatch.setattr(worker_main, name, lambda *_: None)
    near, far = Channel.pair()
    far.send(configure("target"))
    assert worker_main.main(os.dup(near.fileno())) == 1  # else the interpreter would first unload torch
    assert told in caplog.text
    near.close()
    far.close()
