"""What processes are forked from."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from vidspec_service.forking import ForkServer

COUNTS_ITS_THREADS = """
import os, socket, sys
import numpy
fds = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)[1]
os.write(fds[0], str(len(os.listdir("/proc/self/task"))).encode())
"""


@pytest.mark.parametrize("is_bare", [False, True])
def test_it_has_one_thread_when_it_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bare: bool) -> None:
    """However many OpenBLAS would start when numpy is imported; on a machine with one core it starts none."""
    (tmp_path / "counts_its_threads.py").write_text(COUNTS_ITS_THREADS)
    monkeypatch.syspath_prepend(tmp_path)  # what a bare one is told
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    reads, writes = os.pipe()
    with open(reads, encoding="utf-8") as told, closing(ForkServer("counts_its_threads", is_bare=is_bare)) as forks:
        forks.launch(writes)
        os.close(writes)
        assert told.read() == "1"
