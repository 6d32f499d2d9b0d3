"""One decode child: what it may not do, what it cannot see, and that the pool rejects invalid answers from it."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.clips import bar_codes, write_video
from tests.component.decoding.processes import children, fork_children_with, gone, hanging_child
from vidspec_service.decoding.clip import Clip, Decoded, DecodingLimits, FrameRequest
from vidspec_service.decoding.isolation import process
from vidspec_service.decoding.isolation.process import clip_of, frames_memory
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.errors import CapacityError, VideoUnreadable

pytestmark = pytest.mark.component

LIMITS = DecodingLimits()
FOUR = FrameRequest(num_frames=4)


@pytest.mark.parametrize(
    ("modules", "unwanted", "loaded"),
    [
        ("isolation.fork_server reader", {"vidspec_models", "numpy"}, []),
        ("clip", {"vidspec_models", "av"}, []),
        ("pool", {"vidspec_models", "av"}, ["vidspec_models", "vidspec_models.request"]),
    ],
)
def test_no_process_loads_what_another_one_needs(modules: str, unwanted: set[str], loaded: list[str]) -> None:
    """A child starts twice as fast without numpy; the service never loads FFmpeg."""
    names = ", ".join(f"vidspec_service.decoding.{name}" for name in modules.split())
    heavy = unwanted | {"torch", "transformers", "pydantic"}
    code = f"import sys, {names}\nprint(sorted(name for name in sys.modules if name.partition('.')[0] in {heavy}))"
    assert run_python(code) == f"{loaded}\n"


def test_a_working_child_is_confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIDSPEC_API_KEYS", "a-secret")
    os.mkfifo(tmp_path / "pipe")

    async def body() -> None:
        async with DecodePool(replace(LIMITS, timeout_s=20), 1) as pool:
            task = asyncio.create_task(pool.decode(tmp_path / "pipe", FOUR))
            pid = await hanging_child()
            limits = await limits_in_force(pid)
            assert limits["Max open files"] == "64"
            assert limits["Max core file size"] == "0"
            assert limits["Max processes"] == "0"
            assert limits["Max cpu time"] == "22"
            assert limits["Max file size"] == str(LIMITS.max_decoded_bytes)
            assert int(limits["Max address space"]) < 4 * 1024**3
            status = read(f"/proc/{pid}/status")
            assert "NoNewPrivs:\t1" in status
            assert "Threads:\t1" in status
            assert int(read(f"/proc/{pid}/oom_score_adj")) == 1000, "goes before a worker when memory runs out"
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
            assert os.getpgid(pid) == os.getsid(pid) == pid
            assert os.stat(f"/proc/{pid}/fd").st_uid == 0, "whoever runs it may not trace it"
            if os.geteuid() == 0:  # only root may look
                assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"], "its own, and its file not yet"
                assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
                assert "a-secret" not in read(f"/proc/{pid}/environ")
            task.cancel()

    asyncio.run(body())


async def limits_in_force(pid: int) -> dict[str, str]:
    """Soft limits by name, once the child has received its job."""
    async with asyncio.timeout(30):
        while True:
            lines = read(f"/proc/{pid}/limits").splitlines()[1:]
            limits = {line[:26].strip(): line[26:47].strip() for line in lines}
            if limits["Max open files"] == "64":
                return limits
            await asyncio.sleep(0.01)


def read(path: str) -> str:
    return Path(path).read_text()


def test_children_die_with_a_service_that_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = f"""
import asyncio
from pathlib import Path
from vidspec_service.decoding.clip import DecodingLimits, FrameRequest
from vidspec_service.decoding.pool import DecodePool

async def main():
    async with DecodePool(DecodingLimits(), 1) as pool:
        asyncio.get_running_loop().call_later(0.5, lambda: print("hanging", flush=True))
        await pool.decode(Path({str(tmp_path / "pipe")!r}), FrameRequest())

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "hanging\n"
        orphans = [os.pidfd_open(pid) for pid in children(service.pid)]
        service.kill()
    assert orphans

    async def all_gone() -> None:
        async with asyncio.timeout(30):
            for orphan in orphans:
                gone = asyncio.Event()
                asyncio.get_running_loop().add_reader(orphan, gone.set)
                await gone.wait()
                asyncio.get_running_loop().remove_reader(orphan)
                os.close(orphan)

    asyncio.run(all_gone())


FACTS = (
    '{"type":"decoded","timestamps_s":[0,1],"source_indices":[0,1],"source_fps":1,"source_num_frames":2,'
    '"duration_s":2,"width":8,"height":4,"codec":"h264","warnings":[]}'
)


LIAR = """
import fcntl, os, socket
from vidspec_service.decoding.isolation import fork_server

said = open({path!r}, "rb").read()

def lie(missing):
    pool = socket.socket(fileno=0)
    pool.sendall(bytes(1))
    _, (frames,), *_ = socket.recv_fds(pool, 65536, 1)
    os.dup2(frames, 1)
    while pool.recv(65536):
        pass
    {frames}
    socket.send_fds(pool, [said[:1] or b" "], [1])  # nobody asked for a descriptor
    pool.sendall(said[1:])

fork_server._serve = lie
"""


async def believed(answer: str, frames: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Clip:
    (folder / "answer").write_text(answer)
    fork_children_with(LIAR.format(path=str(folder / "answer"), frames=frames), folder, monkeypatch)
    async with DecodePool(LIMITS, 1) as pool:
        return await pool.decode(folder / "answer", FOUR)


@pytest.mark.parametrize("num_frames", [2, 768])
def test_an_answer_that_fits_the_frames_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_frames: int
) -> None:
    answer = FACTS.replace("[0,1]", str([*range(num_frames)]))
    clip = asyncio.run(believed(answer, f"os.ftruncate(1, {num_frames * 96})", tmp_path, monkeypatch))
    assert clip.video.frames.shape == (num_frames, 4, 8, 3)


def test_frames_of_the_largest_size_are_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = FACTS.replace('"width":8', f'"width":{2**18}')
    clip = asyncio.run(believed(answer, f"os.ftruncate(1, {2 * 4 * 2**18 * 3})", tmp_path, monkeypatch))
    assert clip.video.frames.shape == (2, 4, 2**18, 3)


WRITES_MORE_AT_FIRST = """
from vidspec_service.decoding import reader
read_clip = reader.read_clip

def second_attempt(file, request, limits, write, shard):
    write(bytes(10), 10**6)
    return read_clip(file, request, limits, write, shard)

reader.read_clip = second_attempt
"""


def test_frames_of_an_attempt_that_failed_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_video(tmp_path / "clip.mp4", bar_codes(12))
    fork_children_with(WRITES_MORE_AT_FIRST, tmp_path, monkeypatch)

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            assert len((await pool.decode(path, FOUR)).video.frames) == 4

    asyncio.run(body())


def test_what_a_child_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it may where the kernel has no filter."""
    starts_another = f"""
    os.ftruncate(1, 192)
    if (pid := os.fork()) == 0:
        os.close(0)
        import signal
        signal.alarm(60)
        signal.pause()
    open({str(tmp_path / "started")!r}, "w").write(str(pid))
    """
    clip = asyncio.run(believed(FACTS, starts_another, tmp_path, monkeypatch))
    assert clip.video.frames.shape == (2, 4, 8, 3)
    asyncio.run(gone(int((tmp_path / "started").read_text())))


@pytest.mark.parametrize(
    ("answer", "frames"),
    [
        (FACTS, "pass"),  # no frames
        (FACTS, "os.ftruncate(1, 8 * 4 * 3)"),  # half of the frames
        (FACTS, "os.ftruncate(1, 8 * 4 * 3 * 3)"),
        (FACTS, "os.ftruncate(1, 192); fcntl.fcntl(1, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)"),  # not sealed
        (FACTS.replace('"width":8', '"width":-8'), "os.ftruncate(1, 192)"),
        (FACTS.replace('"width":8,"height":4', '"width":-8,"height":-4'), "os.ftruncate(1, 192)"),
        (FACTS.replace('"source_indices":[0,1]', '"source_indices":[9]'), "os.ftruncate(1, 192)"),
        (FACTS.replace('"width":8', '"width":0'), "pass"),
        (FACTS.replace("[0,1]", "[]"), "pass"),
        (FACTS.replace("[0,1]", str([*range(769)])), f"os.ftruncate(1, {769 * 96})"),  # one more than `max_frames`
        (FACTS.replace('"width":8', f'"width":{2**18 + 1}'), f"os.ftruncate(1, {2 * 4 * (2**18 + 1) * 3})"),
        (FACTS.replace('"source_fps":1', '"source_fps":0'), "os.ftruncate(1, 192)"),
        (FACTS.replace("[0,1]", "[0,0]").replace('"source_fps":1', '"source_fps":-1'), "os.ftruncate(1, 192)"),
        (FACTS.replace('"source_num_frames":2', '"source_num_frames":0'), "os.ftruncate(1, 192)"),
        (FACTS.replace('[0,1],"source_indices"', '[0,1e308],"source_indices"'), "os.ftruncate(1, 192)"),
        (FACTS.replace('[0,1],"source_indices"', '[0,1e300],"source_indices"'), "os.ftruncate(1, 192)"),
        (FACTS.replace('"source_indices":[0,1]', f'"source_indices":[0,{2**64}]'), "os.ftruncate(1, 192)"),
        (FACTS.replace('"source_num_frames":2', f'"source_num_frames":{2**64}'), "os.ftruncate(1, 192)"),
        (FACTS.replace("[]", f'["{"long " * 100_000}"]'), "os.ftruncate(1, 192)"),
        (FACTS[:40], "os.ftruncate(1, 192)"),
        ('{"type":"failed","kind":"SystemExit","message":"Traceback","param":null}', "pass"),
        ('{"type":"failed","kind":"","message":"Traceback"}', "pass"),
        ('{"type":"other"}', "pass"),
        ("\x80\x04\x95", "pass"),
        ("[]", "pass"),
        ('{"type":"decoded","more":' + "[" * 60_000, "pass"),
        ("", "pass"),
        (" " * 20_000_000 + FACTS, "os.ftruncate(1, 192)"),
    ],
)
def test_a_child_that_lies_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, frames: str
) -> None:
    gc.collect()  # what earlier tests have left
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(VideoUnreadable) as caught:
        asyncio.run(believed(answer, frames, tmp_path, monkeypatch))
    assert "Traceback" not in caught.value.message
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert children() == []


def test_an_answer_is_not_believed_if_nobody_says_that_its_child_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child could still change the frames."""
    monkeypatch.setattr(process, "_EXIT_REPORT_TIMEOUT_S", 0.1)
    with pytest.raises(CapacityError, match="lost twice"):
        asyncio.run(believed(FACTS, "os.ftruncate(1, 192); os.kill(os.getppid(), 19)", tmp_path, monkeypatch))
    assert children() == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_machine_without_descriptors_or_memory_is_not_the_videos_fault(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    decoded = msgspec.json.decode(FACTS, type=Decoded)
    with frames_memory() as frames:
        os.ftruncate(frames.fileno(), decoded.num_bytes)
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", refuse)
            with pytest.raises(CapacityError):
                clip_of(decoded, frames, LIMITS)
        assert clip_of(decoded, frames, LIMITS).video.frames.nbytes == decoded.num_bytes
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(CapacityError):
        frames_memory()


def test_nobody_can_change_frames_that_the_service_has_taken() -> None:
    decoded = msgspec.json.decode(FACTS, type=Decoded)
    with frames_memory() as frames:
        memory = frames.fileno()
        os.ftruncate(memory, decoded.num_bytes)
        clip = clip_of(decoded, frames, LIMITS)
        for change in (
            partial(os.ftruncate, memory, 0),
            partial(os.ftruncate, memory, 4096),
            partial(os.pwrite, memory, b"x", 0),
        ):
            with pytest.raises(PermissionError):
                change()
    assert not clip.video.frames.any()


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
