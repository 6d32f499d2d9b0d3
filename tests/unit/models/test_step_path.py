"""A step that falls back says so and names what is missing: a compiler, a folder, a package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vidspec_models.backends.cpu import kernel_cache, step
from vidspec_models.backends.select import make_cuda_step
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import Turn
from vidspec_models.step_path import COMPILED, TORCH_OPERATORS, cache_folder_flaw, triton_remedy
from vidspec_models.synthetic.recipe import Recipe, prompt_text
from vidspec_models.video_lm import VideoLM

BROKEN = RuntimeError("0 active drivers")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    monkeypatch.setenv("CC", "cc")
    return tmp_path


def test_without_triton_it_is_to_be_installed() -> None:
    assert "pip install triton" in triton_remedy(ModuleNotFoundError("No module named 'triton'"))


def test_without_a_compiler_one_is_to_be_installed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "C compiler" not in triton_remedy(BROKEN)  # CC names one
    monkeypatch.delenv("CC")
    assert "install a C compiler (Debian: apt-get install gcc libc6-dev)" in triton_remedy(BROKEN)


def test_a_cache_that_is_noexec_is_to_be_moved(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert "set TRITON_CACHE_DIR" in triton_remedy(BROKEN)
    assert "is on a file system mounted noexec" in triton_remedy(BROKEN)


def test_a_cache_that_cannot_be_written_is_to_be_moved(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written" in triton_remedy(BROKEN)
    assert cache_folder_flaw(cache / "a" / "b") == "cannot be written"


def test_a_user_without_a_home_gets_a_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # in no list of users
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "~/.triton/cache cannot be written" in triton_remedy(BROKEN)  # Triton's own name for it


def test_a_cache_below_a_folder_that_may_not_be_read_cannot_be_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch, locked_below: Callable[[Path], None]
) -> None:
    locked_below(cache)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_folder_flaw(cache / "a" / "b") == "cannot be written"


def test_else_the_driver_is_to_be_looked_at(cache: Path) -> None:
    assert "collect_env" in triton_remedy(BROKEN)


def load(tmp_path: Path) -> VideoLM:
    Recipe(pair="tiny", role="target").write(tmp_path)
    return load_model(ModelSpec(path=str(tmp_path), role="target", device="cpu", dtype="float32"))


def test_kernels_that_do_not_compile_leave_a_model_that_is_slow_and_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Uncompiled:
        def __init__(self, *_: object, **__: object) -> None:
            raise OSError("libLLVM.so: cannot open shared object file")

    whole = load(tmp_path)
    monkeypatch.setattr(step, "CpuStep", Uncompiled)
    slow = load(tmp_path)
    assert (whole.decoder.step_path, slow.decoder.step_path.how) == (COMPILED, "torch operators")
    assert slow.decoder.step_path.fallback == "the kernels do not compile"
    assert "install numba again" in slow.decoder.step_path.remedy
    assert not slow.has_kernels
    asked = [Turn(role="user", parts=(prompt_text(0),))]
    assert slow.prepare(asked, []).ids == whole.prepare(asked, []).ids


def test_kernels_that_the_next_start_has_to_compile_again_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path)
    assert "NUMBA_CACHE_DIR" not in caplog.text
    monkeypatch.setattr(kernel_cache, "is_kept", lambda _: False)
    load(tmp_path)
    assert "set NUMBA_CACHE_DIR" in caplog.text


def test_layers_on_several_devices_are_no_fall_back_but_chosen() -> None:
    decoder = SimpleNamespace(geometry=SimpleNamespace(split=(1, 2)))
    assert make_cuda_step(decoder) == TORCH_OPERATORS  # type: ignore[arg-type]


def test_a_cuda_step_that_cannot_be_made_says_why(cache: Path) -> None:
    """There is no CUDA here: whatever fails, the result is a working fallback with a remedy."""
    decoder = SimpleNamespace(geometry=SimpleNamespace(split=(), num_kv_heads=2, head_dim=32), num_heads=4)
    found = make_cuda_step(decoder)  # type: ignore[arg-type]
    assert found.fallback == "steps cannot be compiled and captured"  # type: ignore[union-attr]
    assert found.remedy  # type: ignore[union-attr]


def test_a_gpu_without_room_for_the_captured_steps_is_no_reason_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model does not fit: a remedy for Triton would not help, and `as_load_errors` has the right one."""
    pytest.importorskip("triton")
    from vidspec_models.backends.cuda import step as cuda_step

    def full(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB.")

    monkeypatch.setattr(cuda_step, "CudaStep", full)
    decoder = SimpleNamespace(geometry=SimpleNamespace(split=(), num_kv_heads=2, head_dim=32), num_heads=4)
    with pytest.raises(torch.OutOfMemoryError):
        make_cuda_step(decoder)  # type: ignore[arg-type]
