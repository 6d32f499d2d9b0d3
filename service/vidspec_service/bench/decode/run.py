"""`bench decode` from options to report: every reader on every clip, one after the other, each in its own process."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from vidspec_service.bench.common.camera_clip import ClipOptions
from vidspec_service.bench.common.child import call_in_child
from vidspec_service.bench.common.options import number
from vidspec_service.bench.common.report import Report, Tell
from vidspec_service.bench.decode.readers import Reader, is_installed, means, time_reads
from vidspec_service.bench.decode.report import ClipResult, ReaderResult, decode_report
from vidspec_service.decoding.clip import Clip, FrameRequest
from vidspec_service.decoding.isolation import fork_server
from vidspec_service.decoding.isolation.child import Job
from vidspec_service.decoding.isolation.process import DecodeChild, frames_memory
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.errors import ConfigError
from vidspec_service.forking import ForkServer

_START_TIMEOUT_S = 60.0
_LIMITS = DecodingLimits(timeout_s=600.0)  # slow is a result, too


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions(ClipOptions):
    """By default 32 frames of a minute of 720p."""

    num_frames: int = number(32, "--frames", "per clip")
    repeats: int = number(5, "--repeats", "timed reads")


def measure_decoding(options: DecodeOptions, tell: Tell) -> Report:
    """Raises VideoError for a clip that we cannot read, ConfigError if no decode child starts."""
    readers = [reader for reader in Reader if is_installed(reader)]
    total = len(readers) * (len(options.clips) + (options.rendered_s > 0))
    clips, libraries, done = list[ClipResult](), {"av": version("av")}, 0
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder:
        for name, path in options.files(Path(folder), tell):
            clip = asyncio.run(_through_pool(path, options, 1))[0]  # readers read its frames, and must get the same
            found = {}
            for reader in readers:
                tell(f"{name}: {reader}", done, total)
                found[reader], library_version = _measure(reader, path, clip, options)
                if library_version:
                    libraries[reader.partition(",")[0]] = library_version
                done += 1
            clips.append(
                ClipResult(
                    name=name,
                    codec=clip.codec,
                    duration_s=clip.video.duration_s,
                    source_num_frames=clip.video.source_num_frames,
                    num_frames=len(clip.video.frames),
                    frame_size=(clip.width, clip.height),
                    readers=found,
                )
            )
    not_installed = [reader for reader in Reader if reader not in readers]
    return decode_report(clips, not_installed, options.num_frames, options.repeats, libraries)


def _measure(reader: Reader, path: Path, clip: Clip, options: DecodeOptions) -> tuple[ReaderResult, str]:
    """Its result and its library's version."""
    if reader is Reader.POOL:
        return ReaderResult(wall_s=asyncio.run(_through_pool(path, options, options.repeats))[1]), ""
    if reader is Reader.COLD:
        return ReaderResult(wall_s=tuple(_time_cold(path, options) for _ in range(options.repeats))), ""
    try:
        answer = call_in_child(time_reads, reader, str(path), options.repeats, clip.video.source_indices)
    except ConfigError as error:  # it took its process with it
        return ReaderResult(error=str(error)), ""
    if "error" in answer:
        return ReaderResult(error=answer["error"]), ""
    unlike = difference(clip, answer["means"])
    return ReaderResult(wall_s=answer["wall_s"], cpu_s=answer["cpu_s"], difference=unlike), answer["version"]


def difference(clip: Clip, found: Sequence[Sequence[float]]) -> float:
    """The largest mean difference of a frame's squares from ours, of 255; all of it if frames are missing."""
    if len(found) != len(clip.video.frames):
        return 255.0
    ours = np.array([means(frame) for frame in clip.video.frames])
    return float(np.abs(ours - np.array(found)).mean(axis=1).max())


async def _through_pool(path: Path, options: DecodeOptions, repeats: int) -> tuple[Clip, list[float]]:
    """Our own choice of frames, and how long each decoding took with a spare child ready."""
    times = []
    for _ in range(repeats):
        async with DecodePool(_LIMITS, 1) as pool:  # leaving waits for nothing that is timed
            started = time.perf_counter()
            clip = await pool.decode(path, FrameRequest(num_frames=options.num_frames), options.num_frames)
            times.append(time.perf_counter() - started)
    return clip, times


def _time_cold(path: Path, options: DecodeOptions) -> float:
    request = FrameRequest(num_frames=options.num_frames)
    job = Job(path=str(path.absolute()), request=request, default_num_frames=options.num_frames, limits=_LIMITS)
    started = time.perf_counter()
    with closing(ForkServer(fork_server.__name__, is_bare=True)) as forks:
        child = DecodeChild(forks)
        child.start(_START_TIMEOUT_S)
        with frames_memory() as frames:
            child.decode(job, frames)
        return time.perf_counter() - started
