"""The fork servers, from which processes are forked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from ast import literal_eval
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest

from vidspec_service import forking
from vidspec_service.forking import ForkServer

COUNTS_ITS_THREADS = """
import os, socket, sys
import numpy
fds = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)[1]
os.write(fds[0], str(len(os.listdir("/proc/self/task"))).encode())
"""

DIES_SLOWLY_ONCE = """
import os, pathlib, socket, sys, time
begun = pathlib.Path(__file__).with_suffix(".begun")
if not begun.exists():
    begun.touch()
    os.close(int(sys.argv[1]))
    time.sleep(60)
fds = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)[1]
os.write(fds[0], b"forked")
"""

CANNOT_BE_REAPED_ONCE = """
import ctypes, os, pathlib, socket, sys, time
PTRACE_SEIZE, PR_SET_PTRACER, ANYBODY = 0x4206, 0x59616D61, ctypes.c_ulong(-1)
begun, server, libc = pathlib.Path(__file__).with_suffix(".begun"), os.getpid(), ctypes.CDLL(None)
fds = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)[1]
if begun.exists():
    os.write(fds[0], b"forked")
else:
    begun.touch()
    libc.prctl(PR_SET_PTRACER, ANYBODY, 0, 0, 0)
    if os.fork() == 0:
        is_traced = libc.ptrace(PTRACE_SEIZE, server, 0, 0) == 0
        os.write(fds[0], str(is_traced * os.getpid()).encode())
        os.close(fds[0])
        time.sleep(20 * is_traced)
        os._exit(0)
    os.close(fds[0])
    time.sleep(60)
"""

CANNOT_FORK = """
import os, sys
from vidspec_service.engine import fork_server
def fork():
    raise OSError("no process is left")
os.fork = fork
fork_server.worker_main.import_libraries = lambda: None
fork_server.main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
"""

TELLS_WHAT_IT_HAS = """
import os, socket, sys
fds = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)[1]
streams = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
os.write(fds[0], repr((dict(os.environ), os.getcwd(), streams)).encode())
"""

HANGS = """
import signal
signal.pause()
"""

FORKS = """
import os, sys
from vidspec_service.forking import serve_forks
serve_forks(int(sys.argv[1]), lambda channel: os._exit(3))
"""

FORKS_AFTER_A_FAILURE_WITH_FEW_DESCRIPTORS = """
import os, resource, sys
from vidspec_service.forking import serve_forks
fork, failures = os.fork, [OSError("no process is left")]
def fork_later():
    if failures:
        raise failures.pop()
    return fork()
os.fork = fork_later
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
serve_forks(int(sys.argv[1]), lambda channel: os._exit(3))
"""

FORKS_WHAT_COUNTS_ITS_DESCRIPTORS = """
import os, signal, sys
from vidspec_service.forking import serve_forks
def count(channel):
    num_held = sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in range(3, 100))
    os.write(channel, str(num_held).encode())
    signal.pause()
serve_forks(int(sys.argv[1]), count)
"""

FORKS_WHAT_IS_ASKED_TO_END = """
import os, signal, sys
from vidspec_service.forking import serve_forks, tie_to_parent
def end(channel):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getppid(), number)
        os.kill(os.getpid(), number)
    os._exit(3)
tie_to_parent(int(sys.argv[2]))
serve_forks(int(sys.argv[1]), end)
"""


@pytest.mark.parametrize("is_bare", [False, True])
def test_it_has_one_thread_when_it_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bare: bool) -> None:
    """However many threads OpenBLAS would start when numpy is imported; on a one-core machine it starts none."""
    (tmp_path / "counts_its_threads.py").write_text(COUNTS_ITS_THREADS)
    monkeypatch.syspath_prepend(tmp_path)  # a bare server gets this path
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    with closing(ForkServer("counts_its_threads", is_bare=is_bare)) as forks:
        assert _told(forks) == "1"


@pytest.mark.parametrize("is_bare", [False, True])
def test_a_bare_one_has_no_secret_and_no_way_to_write_and_is_told_where_libraries_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bare: bool
) -> None:
    """A Python that finds its own library only by LD_LIBRARY_PATH does not start without it.

    None takes a file in the working folder for a library.
    """
    (working := tmp_path / "working").mkdir()
    (working / "socket.py").write_text("raise SystemExit")
    monkeypatch.chdir(working)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("VIDSPEC_API_KEYS", "a-secret")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with _fork_server(TELLS_WHAT_IT_HAS, tmp_path, monkeypatch, is_bare=is_bare) as forks:
        environment, folder, streams = literal_eval(_told(forks))
    assert environment["LD_LIBRARY_PATH"] == str(tmp_path)
    assert ("VIDSPEC_API_KEYS" in environment) is not is_bare
    ours = [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)]
    assert (folder, streams[1:]) == (("/", ["/dev/null"] * 2) if is_bare else (os.getcwd(), ours))
    assert streams[0] == "/dev/null"


def test_one_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket takes some hundred requests; who sends more, the event loop, must not wait for it."""
    with _fork_server(HANGS, tmp_path, monkeypatch) as forks, socket.socket() as given:
        for _ in range(1000):
            forks.launch(given.fileno())


def test_one_that_dies_slowly_is_replaced_at_the_next_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sockets of a dying server close some time before the process can be reaped."""
    with _fork_server(DIES_SLOWLY_ONCE, tmp_path, monkeypatch) as forks:
        assert [_told(forks) for _ in range(2)] == ["", "forked"]


@pytest.mark.filterwarnings("ignore:subprocess .* is still running")
def test_one_that_the_kernel_does_not_let_go_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a disk does not answer; here a process that traces it is in the way."""
    monkeypatch.setattr(forking, "_END_TIMEOUT_S", 0.1)
    with _fork_server(CANNOT_BE_REAPED_ONCE, tmp_path, monkeypatch) as forks:
        if not (tracer := int(_told(forks))):
            pytest.skip("no process may trace another here")
        forks.restart()
        assert _told(forks) == "forked"
        assert psutil.Process(tracer).status() != psutil.STATUS_ZOMBIE  # so it was not waited for
        os.kill(tracer, signal.SIGKILL)


def test_one_that_was_closed_is_started_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a process when it is closed may take it for one that hangs."""
    with _fork_server(FORKS, tmp_path, monkeypatch) as forks:
        before = psutil.Process().children()
        forks.start()
        forks.close()
        forks.restart()
        assert set(psutil.Process().children()) <= set(before)
        with pytest.raises(ConnectionError):
            forks.launch(0)


def test_an_end_is_told_though_whoever_started_the_service_ignores_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ignored SIGCHLD is inherited, and then the fork server has no ended children to wait for."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with _fork_server(FORKS, tmp_path, monkeypatch) as forks:
            assert [_exit_code(forks) for _ in range(2)] == [b"3", b"3"]
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_it_keeps_nothing_of_a_process_that_has_ended_or_could_not_be_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _fork_server(FORKS_AFTER_A_FAILURE_WITH_FEW_DESCRIPTORS, tmp_path, monkeypatch) as forks:
        assert [_exit_code(forks) for _ in range(20)] == [b"", *[b"3"] * 19]


def test_a_process_holds_nothing_but_its_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the ends of other processes' sockets: it could tell for them how they end."""
    with _fork_server(FORKS_WHAT_COUNTS_ITS_DESCRIPTORS, tmp_path, monkeypatch) as forks, ExitStack() as held:
        for _ in range(2):
            (channel, its_channel), (life, its_life) = socket.socketpair(), socket.socketpair()
            held.enter_context(channel), held.enter_context(life)
            with its_channel, its_life:
                forks.launch(its_channel.fileno(), its_life.fileno())
            assert channel.recv(64) == b"1"


def test_a_process_whose_parent_has_ended_before_it_could_say_so_ends() -> None:
    code = "from vidspec_service.forking import die_with_parent; die_with_parent(-1); print('lives')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b""


def test_a_signal_to_all_processes_of_a_server_ends_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd, timeout(1) and a closed terminal send it to all of them, and running requests are to be finished."""
    with _fork_server(FORKS_WHAT_IS_ASKED_TO_END, tmp_path, monkeypatch) as forks:
        assert [_exit_code(forks) for _ in range(2)] == [b"3", b"3"]


def _told(forks: ForkServer) -> str:
    reads, writes = os.pipe()
    with open(reads, encoding="utf-8") as channel:
        forks.launch(writes)
        os.close(writes)
        return channel.read()


def _exit_code(forks: ForkServer) -> bytes:
    (channel, its_channel), (life, its_life) = socket.socketpair(), socket.socketpair()
    with channel, life:
        with its_channel, its_life:
            forks.launch(its_channel.fileno(), its_life.fileno())
        return life.recv(64)


@contextmanager
def _fork_server(
    code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, is_bare: bool = True
) -> Iterator[ForkServer]:
    (folder / "a_fork_server.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of a server that is not bare
    with closing(ForkServer("a_fork_server", *arguments, is_bare=is_bare)) as forks:
        yield forks


def test_a_worker_that_cannot_be_forked_is_told_in_the_format_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where a container's limit of processes is reached."""
    with _fork_server(CANNOT_FORK, tmp_path, monkeypatch, "json", is_bare=False) as forks:
        assert _told(forks) == ""
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "cannot fork: no process is left"


def test_a_process_goes_sooner_when_memory_runs_out_and_never_later_than_its_server() -> None:
    """A server has a higher score already by systemd's `OOMScoreAdjust=`, or in some of Kubernetes' pods."""
    code = (
        "from pathlib import Path; from vidspec_service.forking import give_way\n"
        "own = Path('/proc/self/oom_score_adj')\n"
        "give_way(200)\nprint(own.read_text())\n"
        "own.write_text('999')\ngive_way(200)\nprint(own.read_text())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    assert [int(score) for score in found.stdout.split()] == [max(200, ours), 999]
