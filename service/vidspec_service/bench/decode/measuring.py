"""`bench decode` from options to report: every reader on every clip, one after the other, each in its own process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from vidspec_service.bench.decode.libraries import is_installed
from vidspec_service.bench.decode.options import DecodeOptions, Reader
from vidspec_service.bench.decode.rendering import FPS, HEIGHT, WIDTH, render_clip
from vidspec_service.bench.decode.report import ClipResult, DecodeReport, ReaderResult
from vidspec_service.bench.facts import hardware, load_average, now, versions
from vidspec_service.bench.tell import Tell
from vidspec_service.decoding.isolation.child import Job
from vidspec_service.decoding.isolation.process import DecodeChild
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.decoding.selection import Clip, FrameRequest

_START_TIMEOUT_S = 60.0
_WORKER_TIMEOUT_S = 600.0
_LIMITS = DecodingLimits(timeout_s=600.0)  # slow is a result, too


def measure_decoding(options: DecodeOptions, command: str, tell: Tell) -> DecodeReport:
    """Raises VideoError for a clip that we cannot read, ConfigError if no decode child starts."""
    created, load = now(), load_average()
    readers = [reader for reader in Reader if is_installed(reader)]
    total = len(readers) * (len(options.clips) + (options.rendered_s > 0))
    results, library_versions, done = [], dict[str, str](), 0
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder:
        for name, path in _clips(options, Path(folder), tell):
            clip = asyncio.run(_choose(path, options))
            found = {}
            for reader in readers:
                tell(f"{name}: {reader}", done, total)
                found[reader], library_version = _measure(reader, path, clip, options)
                if library_version:
                    library_versions[reader.partition(",")[0]] = library_version
                done += 1
            results.append(_clip_result(name, clip, found))
    return DecodeReport(
        created=created,
        command=command,
        hardware=hardware({}),
        versions={**versions(), "av": version("av"), **library_versions},
        num_frames=options.num_frames,
        repeats=options.repeats,
        not_installed=tuple(reader for reader in Reader if reader not in readers),
        clips=tuple(results),
        load_average_before=load,
    )


def _clips(options: DecodeOptions, folder: Path, tell: Tell) -> list[tuple[str, Path]]:
    clips = [(path.name, path) for path in options.clips]
    if options.rendered_s > 0:
        tell("rendering a clip", 0, 0)
        render_clip(folder / "rendered.mp4", options.rendered_s)
        name = f"rendered {options.rendered_s:g} s, {WIDTH}x{HEIGHT}, {FPS} fps"
        clips.insert(0, (name, folder / "rendered.mp4"))
    return clips


async def _choose(path: Path, options: DecodeOptions) -> Clip:
    """Our own choice of frames; all readers then read these, and are compared with how these look."""
    async with DecodePool(_LIMITS, 1) as pool:
        return await pool.decode(path, FrameRequest(num_frames=options.num_frames), options.num_frames)


def _measure(reader: Reader, path: Path, clip: Clip, options: DecodeOptions) -> tuple[ReaderResult, str]:
    """Its result and its library's version."""
    if reader is Reader.POOL:
        return ReaderResult(wall_s=tuple(asyncio.run(_time_pool(path, options)))), ""
    if reader is Reader.COLD:
        return ReaderResult(wall_s=tuple(_time_cold(path, options) for _ in range(options.repeats))), ""
    arguments = [reader.value, str(path), str(options.repeats), *map(str, clip.video.source_indices)]
    command = [sys.executable, "-m", "vidspec_service.bench.decode.worker", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_WORKER_TIMEOUT_S, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return ReaderResult(error=type(error).__name__), ""
    if "error" in answer:
        return ReaderResult(error=answer["error"]), ""
    result = ReaderResult(
        wall_s=tuple(answer["wall_s"]),
        cpu_s=tuple(answer["cpu_s"]),
        difference=difference(clip, answer["means"]),
    )
    return result, answer["version"]


def difference(clip: Clip, found: Sequence[Sequence[float]]) -> float:
    """The largest mean difference of a frame's squares from ours, of 255; infinite if frames are missing."""
    from vidspec_service.bench.decode.worker import means

    if len(found) != len(clip.video.frames):
        return float("inf")
    ours = np.array([means(frame) for frame in clip.video.frames])
    return float(np.abs(ours - np.array(found)).mean(axis=1).max())


async def _time_pool(path: Path, options: DecodeOptions) -> list[float]:
    times = []
    request = FrameRequest(num_frames=options.num_frames)
    for _ in range(options.repeats):
        async with DecodePool(_LIMITS, 1) as pool:  # leaving waits for nothing that is timed
            started = time.perf_counter()
            await pool.decode(path, request, options.num_frames)
            times.append(time.perf_counter() - started)
    return times


def _time_cold(path: Path, options: DecodeOptions) -> float:
    request = FrameRequest(num_frames=options.num_frames)
    job = Job(path=str(path.absolute()), request=request, default_num_frames=options.num_frames, limits=_LIMITS)
    started = time.perf_counter()
    child = DecodeChild()
    child.start(_START_TIMEOUT_S)
    child.decode(job)
    return time.perf_counter() - started


def _clip_result(name: str, clip: Clip, found: Mapping[Reader, ReaderResult]) -> ClipResult:
    return ClipResult(
        name=name,
        codec=clip.codec,
        duration_s=clip.video.duration_s,
        source_num_frames=clip.video.source_num_frames,
        num_frames=len(clip.video.frames),
        frame_size=(clip.width, clip.height),
        readers=dict(found),
    )
