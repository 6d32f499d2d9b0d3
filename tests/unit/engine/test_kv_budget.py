"""A device's budget is what remains of its share; workers that share it get equal token counts; refusals say why."""

from __future__ import annotations

import pytest

from vidspec_service.engine.kv_budget import CPU_KV_CACHE_TOKENS, DeviceMemory, KVBudgets, WorkerMemory, kv_budgets
from vidspec_service.errors import ConfigError

GIB = 2**30
KIB = 2**10


def on(device: str = "cuda:0", **sizes: float) -> DeviceMemory:
    """A device's memory; sizes in GiB, a token's size in KiB."""
    given = {"total": 80.0, "free": 60.0, "weights": 16.0, "activations": 2.0, "token": 64.0, **sizes}
    token_bytes = int(given.pop("token") * KIB)
    return DeviceMemory(device=device, token_bytes=token_bytes, **{name: int(x * GIB) for name, x in given.items()})


def worker(*devices: DeviceMemory, context: int = 32768, at: float = 0.0) -> WorkerMemory:
    return WorkerMemory(context=context, measured_at=at, devices=devices or (on(),))


def test_the_room_is_the_devices_share_less_what_is_held_and_what_work_takes() -> None:
    # 0.9 * 80 - (80 - 60) - 2 = 50 GiB, of 64 KiB each
    assert kv_budgets({"target": worker()}, 0.9) == {"target": 50 * GIB // (64 * KIB)}


def test_a_lower_share_is_less_room() -> None:
    assert kv_budgets({"target": worker()}, 0.5) == {"target": 18 * GIB // (64 * KIB)}


def test_the_operators_number_is_the_most() -> None:
    assert kv_budgets({"target": worker()}, 0.9, most=40000) == {"target": 40000}
    assert kv_budgets({"target": worker()}, 0.5, most=10**9)["target"] < 10**6


def test_two_workers_on_one_device_hold_as_many_tokens_each() -> None:
    """The worker that measured last saw what both hold: the first one's measurement is outdated."""
    target = worker(on(free=64.0), at=1.0)
    draft = worker(on(free=60.0, weights=2.0, activations=1.0, token=16.0), at=2.0)
    room = 72 - 20 - 2 - 1
    expected = room * GIB // (80 * KIB)
    assert kv_budgets({"target": target, "draft": draft}, 0.9) == {"target": expected, "draft": expected}
    assert kv_budgets({"draft": draft, "target": target}, 0.9) == {"target": expected, "draft": expected}


def test_on_devices_of_their_own_each_has_what_fits_there() -> None:
    found = kv_budgets({"target": worker(), "draft": worker(on("cuda:1", total=24.0, free=20.0, token=16.0))}, 0.9)
    assert found["target"] == 50 * GIB // (64 * KIB)
    assert found["draft"] == int((0.9 * 24 - 4 - 2) * GIB) // (16 * KIB)


def test_of_several_devices_the_tightest_decides() -> None:
    split = worker(on("cuda:0"), on("cuda:1", free=30.0, activations=1.0))
    assert kv_budgets({"target": split}, 0.9) == {"target": 21 * GIB // (64 * KIB)}


def test_what_other_programs_hold_is_no_room() -> None:
    alone, beside = (kv_budgets({"target": worker(on(free=free))}, 0.9)["target"] for free in (60.0, 50.0))
    assert alone - beside == 10 * GIB // (64 * KIB)


def test_a_context_that_just_fits_is_served_and_one_token_more_is_refused() -> None:
    fits = 50 * GIB // (64 * KIB)
    assert kv_budgets({"target": worker(context=fits)}, 0.9) == {"target": fits}
    with pytest.raises(ConfigError) as refused:
        kv_budgets({"target": worker(context=fits + 1)}, 0.9)
    assert f"--max-context {fits} or lower" in refused.value.message


def test_a_refusal_is_one_line_with_the_numbers_and_the_settings() -> None:
    tight = worker(on(total=24.0, free=6.0, weights=15.5, activations=2.25, token=56.0), context=128000)
    with pytest.raises(ConfigError) as refused:
        kv_budgets({"target": tight}, 0.9)
    text = refused.value.message
    assert text.startswith("the target has no room for one context on cuda:0: 128000 tokens need 6.84 GiB")
    assert "1.35 GiB are left, enough for 25278 tokens" in text
    assert (
        "15.50 GiB of weights and 2.25 of activations; 6.00 free of 24.00, of which a share of 0.9 may be used" in text
    )
    assert "--max-context 25278 or lower, --gpu-memory-utilization above 0.9" in text
    assert "\n" not in text


def test_where_nothing_is_left_no_context_is_suggested() -> None:
    full = {"target": worker(on(free=1.0), at=2.0), "draft": worker(on(free=1.0), at=1.0)}
    with pytest.raises(ConfigError) as refused:
        kv_budgets(full, 1.0)
    text = refused.value.message
    assert "0.00 GiB are left, enough for 0 tokens" in text
    assert "--max-context" not in text
    assert "above 1" not in text
    assert "a device for each model (--draft-device)" in text


def in_memory(*, free: float, context: int = 32768, at: float = 0.0, activations: float = 1.0) -> WorkerMemory:
    return worker(on("cpu", total=16.0, free=free, weights=4.0, activations=activations), context=context, at=at)


def test_workers_on_the_cpu_get_what_the_machine_has_room_for_and_no_more_than_is_usual() -> None:
    pair = {"target": in_memory(free=8.0, at=2.0), "draft": in_memory(free=12.0, at=1.0)}
    expected = int((0.9 * 16 - 8 - 2) * GIB) // (2 * 64 * KIB)
    assert kv_budgets(pair, 0.9) == {"target": expected, "draft": expected}
    plenty = {"target": in_memory(free=16.0, context=100)}
    assert kv_budgets(plenty, 0.9) == {"target": CPU_KV_CACHE_TOKENS}
    assert kv_budgets(plenty, 0.9, most=70000) == {"target": 70000}


def test_on_the_cpu_a_context_is_granted_where_work_might_take_its_room(caplog: pytest.LogCaptureFixture) -> None:
    pair = {"target": in_memory(free=4.5, activations=5.0, at=2.0), "draft": in_memory(free=4.5, at=1.0)}
    assert kv_budgets(pair, 0.9) == {"target": 32768, "draft": 32768}
    assert not caplog.records


def test_a_context_that_the_memory_has_no_room_for_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pair = {"target": in_memory(free=3.5, at=2.0), "draft": in_memory(free=9.0, at=1.0)}
    assert kv_budgets(pair, 0.9) == {"target": 32768, "draft": 32768}
    (record,) = caplog.records
    assert record.getMessage() == (
        "there may be no room for one context: 32768 tokens need 4.00 GiB of keys and values, but only 3.50 GiB of "
        "memory are free, enough for 28672 tokens; choose a lower --max-context or a smaller model, or have more "
        "memory: the kernel ends a worker when none is left"
    )


TARGET, DRAFT = worker(context=4000, at=1.0), worker(on(weights=1.0, token=8.0), context=4000, at=2.0)


def budgets_of(*roles: str) -> KVBudgets:
    return KVBudgets(roles, 0.9, most=5000)


def test_no_budget_is_sent_before_both_workers_have_loaded() -> None:
    budgets = budgets_of("target", "draft")
    assert budgets.on_loaded("target", TARGET) == {}
    assert budgets.on_loaded("draft", DRAFT) == {"target": 5000, "draft": 5000}


def test_a_restarted_worker_gets_the_same_budget_whatever_is_free_now() -> None:
    budgets = budgets_of("target", "draft")
    budgets.on_loaded("target", TARGET)
    budgets.on_loaded("draft", DRAFT)
    assert budgets.on_loaded("target", worker(on(free=0.0), context=4000)) == {"target": 5000}


def test_a_worker_without_room_for_a_context_gets_no_budget() -> None:
    with pytest.raises(ConfigError, match="no room for one context"):
        budgets_of("target").on_loaded("target", worker(on(free=1.0)))
