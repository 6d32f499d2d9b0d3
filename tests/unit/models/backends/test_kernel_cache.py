"""Kernels kept from one start to the next are those of the present sources, and readable."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core import config

from vidspec_models.backends.cpu import kernel_cache
from vidspec_models.backends.cpu.kernel_cache import compiled, is_kept, sources_digest

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test's kernels."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def start() -> bool:
    """Compile a kernel as a new process does, and run it; whether it was kept from an earlier start."""
    return bool(compile_twice().stats.cache_hits)


def compile_twice() -> Any:
    def twice(number: int) -> int:
        return 2 * number

    kernel_cache.forget_useless.cache_clear()
    kernel: Any = compiled(twice)
    assert kernel(3) == 6
    return kernel


def test_a_kernel_that_other_sources_made_is_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a return to the version before, and nothing is left of the other one."""
    found = []
    for digest in ("first", "first", "second", "second", "first"):
        monkeypatch.setattr(kernel_cache, "sources_digest", lambda digest=digest: digest)
        found.append(start())
        assert {digest in path.name for path in cache.rglob("*.nb[ic]")} == {True}
    assert found == [False, True, False, True, False]


def test_a_changed_source_is_noticed_however_old_its_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one of another folder whose numbers are compiled into kernels."""
    folder = tmp_path / "cpu"
    folder.mkdir()
    sources = [folder / "tile.py", folder / "kernel.py", tmp_path / "int8.py"]
    monkeypatch.setattr(kernel_cache, "_INT8", sources[-1])
    for source in sources:
        source.write_text("a = 1\n")
    digests = {sources_digest(folder)}
    for source in sources:
        source.write_text("a = 2\n")
        os.utime(source, (10, 10))
        sources_digest.cache_clear()
        digests.add(sources_digest(folder))
    assert len(digests) == 4


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("size", [0, 200])
def test_a_file_cut_short_is_compiled_anew(cache: Path, kind: str, size: int) -> None:
    start()
    (kept,) = cache.rglob(kind)
    os.truncate(kept, size)
    assert not start()
    assert start()


def in_two_processes(cache: Path, kernel: str) -> list[str]:
    """What two `say` that run this code at the same time; `is_first` in one, `other` is a socket to the other one."""
    (cache / "both.py").write_text(f"""
import os, socket
import numpy
from vidspec_models.backends.cpu import kernel_cache
ends = socket.socketpair()
is_first = bool(os.fork())
other = ends[is_first]
def say(what):  # in one write: `print` makes two where output is not buffered, and the other's may come between
    os.write(1, f"{{what}}\\n".encode())
{kernel}
if is_first:
    os.wait()
""")  # numba keeps only what comes from a file
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}  # noqa: TID251
    both = subprocess.run(
        [sys.executable, cache / "both.py"], env=variables, text=True, check=True, capture_output=True
    )
    return sorted(both.stdout.split())


def test_of_two_processes_that_need_a_kernel_at_the_same_time_one_compiles_it(cache: Path) -> None:
    kernel = """
@kernel_cache.compiled
def slow(numbers):
    for number in range(len(numbers)):
        numbers[number] = max(numbers)
slow(numpy.zeros(3))
say(len(slow.stats.cache_hits))
"""
    assert in_two_processes(cache, kernel) == ["0", "1"]


def test_a_process_that_compiles_a_kernel_for_other_types_is_not_waited_for(cache: Path) -> None:
    """As a target in int8 and a draft in float32, which start at the same time."""
    kernel = """
from numba.extending import overload
def meet():
    pass
@overload(meet)
def _meet():  # called while the kernel is compiled
    other.settimeout(20)
    other.send(b"here")
    other.recv(4)
    return lambda: None
@kernel_cache.compiled
def kernel(number):
    meet()
    return number
say(kernel(1 if is_first else 0.5))
"""
    assert in_two_processes(cache, kernel) == ["0.5", "1"]
    assert len([*cache.rglob("kernel-*.nbc"), *cache.rglob("*.kernel-*.nbc")]) == 2


def test_a_kernel_is_kept_only_in_the_folder_that_was_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_kept(compile_twice())
    (cache / "file").touch()
    monkeypatch.setattr(config, "CACHE_DIR", str(cache / "file" / "folder"))  # numba takes another one
    assert not is_kept(compile_twice())


def test_where_nothing_can_be_kept_a_kernel_still_runs(cache: Path) -> None:
    """As on a full disk."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))
    try:
        assert not is_kept(compile_twice())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert not list(cache.rglob("*.nb[ic]"))


def test_a_kernel_runs_where_its_locks_cannot_be_opened(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of another user in a shared folder."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(kernel_cache, "locked", refuse)
    compile_twice()
