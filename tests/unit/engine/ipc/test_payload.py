"""A request reaches another process bit for bit, frames included, and leaves no file descriptor open."""

import asyncio
import errno
import gc
import os
import pickle
import resource
import threading
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.requests import request_of
from vidspec_models.request import (
    VIDEO,
    Compression,
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    TowerOutput,
    Turn,
    Video,
)
from vidspec_service.engine.ipc import payload as payload_module
from vidspec_service.engine.ipc.channel import MAX_FDS
from vidspec_service.engine.ipc.payload import TowerMemory, payload_of, read_request, write_request
from vidspec_service.errors import CapacityError
from vidspec_service.shared_frames import SharedFrames


def video(seed: int, shape: tuple[int, int, int, int]) -> Video:
    return Video(
        frames=np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8),
        source_indices=tuple(range(shape[0])),
        source_fps=29.97,
        source_num_frames=100,
        duration_s=3.3,
        key=f"video {seed}",
    )


@given(
    text=st.text(max_size=20),
    seed=st.integers(0, 2**64 - 1),
    mode=st.sampled_from(SpeculationMode),
    committed=st.lists(st.integers(0, 200_000), max_size=5),
    max_tokens=st.none() | st.integers(1, 2**40),
)
def test_every_field_arrives_as_it_was(
    text: str, seed: int, mode: SpeculationMode, committed: list[int], max_tokens: int | None
) -> None:
    sent = GenerationRequest(
        request_id=text,
        turns=(Turn(role="user", parts=(VIDEO, VIDEO, "Was ist das? 🎬")), Turn(role="assistant", parts=(text,))),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.1, top_p=0.3, top_k=7, seed=seed),
        stop=(text, "."),
        speculation=mode,
        compression=Compression.DYCOKE,
        committed=tuple(committed),
    )
    assert read_request(write_request(sent)) == sent


def test_frames_of_several_videos_arrive_unchanged_contiguous_or_not() -> None:
    base = video(0, (4, 6, 6, 3))
    strided = Video(
        frames=base.frames[::2, ::-1], source_indices=(0, 2), source_fps=1.0, source_num_frames=4, duration_s=4.0
    )
    videos = (base, strided, video(1, (1, 2, 2, 3)))
    found = read_request(write_request(GenerationRequest(request_id="r", turns=(), videos=videos)))
    for got, sent in zip(found.videos, videos, strict=True):
        np.testing.assert_array_equal(got.frames, sent.frames)
        others = [each.name for each in fields(Video) if each.name != "frames"]
        assert [getattr(got, name) for name in others] == [getattr(sent, name) for name in others]


def shared(video: Video) -> Video:
    """The video as a decoder hands it over, in shared memory."""
    fd = os.memfd_create("frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, video.frames.tobytes())
        return replace(video, frames=SharedFrames.sealed(fd, video.frames.shape))
    finally:
        os.close(fd)


def test_decoded_frames_are_handed_over_without_a_copy() -> None:
    videos = [video(number, (2, 4, 6, 3)) for number in range(4)]
    last = shared(videos[3])
    sent = (shared(videos[0]), videos[1], shared(videos[2]), replace(last, frames=last.frames[1:]))
    payload = write_request(GenerationRequest(request_id="r", turns=(), videos=sent))
    assert len(payload) == 3  # the request with copies of two videos, and the two shared videos
    num_bytes = [os.fstat(fd).st_size for fd in payload]
    assert num_bytes[1:] == [videos[0].frames.nbytes, videos[2].frames.nbytes]
    found = read_request(payload).videos
    del sent, last  # the frames outlive the sender's object
    for got, video_ in zip(found[:3], videos, strict=False):
        np.testing.assert_array_equal(got.frames, video_.frames)
    np.testing.assert_array_equal(found[3].frames, videos[3].frames[1:])


def test_what_one_worker_does_to_frames_no_other_sees() -> None:
    original = video(0, (2, 4, 6, 3))
    clip = shared(original)
    request = GenerationRequest(request_id="r", turns=(), videos=(clip,))
    one, other = (read_request(write_request(request)).videos[0].frames for _ in range(2))
    one[:] = 0
    np.testing.assert_array_equal(other, original.frames)
    np.testing.assert_array_equal(clip.frames, original.frames)


def test_a_pickler_that_takes_buffers_as_they_are_copies_no_frames() -> None:
    clip, buffers = shared(video(0, (2, 4, 6, 3))), list[pickle.PickleBuffer]()
    pickled = pickle.dumps(clip.frames, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1
    np.testing.assert_array_equal(pickle.loads(pickled, buffers=buffers), clip.frames)


def test_more_clips_than_a_message_takes_descriptors_are_copied() -> None:
    clips = tuple(shared(video(number, (1, 2, 2, 3))) for number in range(MAX_FDS + 3))
    payload = write_request(GenerationRequest(request_id="r", turns=(), videos=clips))
    assert len(payload) == MAX_FDS - 1  # leaves room for the descriptor of committed tokens
    for got, sent in zip(read_request(payload).videos, clips, strict=True):
        np.testing.assert_array_equal(got.frames, sent.frames)


def test_reading_closes_the_descriptors_and_the_frames_take_theirs_along() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        read_request(
            write_request(GenerationRequest(request_id="r", turns=(), videos=(shared(video(0, (1, 2, 2, 3))),)))
        )
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_descriptor_the_server_is_full_and_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(CapacityError):
        asyncio.run(payload_of(request_of()))


def test_a_payload_that_finds_no_room_leaves_no_descriptor_open() -> None:
    clips = (video(0, (4, 64, 64, 3)), shared(video(1, (1, 2, 2, 3))))
    asked = GenerationRequest(request_id="r", turns=(), videos=clips)
    before, limits = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_request(asked)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == before


async def leave(goes_on: threading.Event) -> list[dict[str, Any]]:
    """Ask for a payload and leave before it is written; returns the exceptions that nobody has handled."""
    unhandled = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    asking = asyncio.create_task(payload_of(request_of()))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    goes_on.set()
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
    del asking
    gc.collect()
    return unhandled


def test_whoever_leaves_while_a_payload_is_written_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def held(request: GenerationRequest) -> tuple[int, ...]:
        assert goes_on.wait(20)
        return write_request(request)

    monkeypatch.setattr(payload_module, "write_request", held)
    before = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(leave(goes_on)) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_payload_that_finds_no_room_after_its_client_has_left_is_no_unhandled_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()

    def full(_: GenerationRequest) -> tuple[int, ...]:
        assert goes_on.wait(20)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(payload_module, "write_request", full)
    assert asyncio.run(leave(goes_on)) == []


def test_what_a_tower_made_of_several_videos_arrives_and_is_gone_with_its_last_holder() -> None:
    before, rng = len(os.listdir("/proc/self/fd")), np.random.default_rng(0)
    shapes = [(2, 3, 4), (1, 3, 4)]
    sent = [TowerOutput(placeholder_text=f"{shape}", rows=rng.random(shape, np.float32)) for shape in shapes]
    memory = TowerMemory.of(sent)
    found = memory.read()
    del memory
    assert len(os.listdir("/proc/self/fd")) == before
    for got, video_ in zip(found, sent, strict=True):
        assert got.placeholder_text == video_.placeholder_text
        np.testing.assert_array_equal(got.rows, video_.rows)
