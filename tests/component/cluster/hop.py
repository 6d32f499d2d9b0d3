"""The latency that a cluster adds, compared with `vidspec serve` in turns: `python -m tests.component.cluster.hop`.

One node, one frontend, one engine; each server is idle while the other is asked. Both have the features of every video
cached, so that the time to the first token is mostly the cost of the hop.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import httpx

from tests.component.cluster.ray_cluster import running_cluster, server_alone
from tests.component.cluster.streams import render_clips
from vidspec_service.cli.terminal import say

MODES = ("off", "auto")
NUM_CLIPS, WARM_UP = 28, 4
FIRST, SECOND = "Describe the video.", "How many objects are there? Describe the video."


def ask(client: httpx.Client, clip: Path, prompt: str) -> tuple[float, float]:
    """The times to the first text and from the first to the last, in milliseconds."""
    began = time.monotonic()
    times = []
    asked = {"prompt": prompt, "stream": "true", "max_tokens": "80", "temperature": "0", "ignore_eos": "true"}
    with client.stream("POST", "/v1/video-chat", data=asked, files={"video": clip.read_bytes()}) as response:
        response.raise_for_status()
        times = [time.monotonic() for line in response.iter_lines() if '"delta"' in line and '"content"' in line]
    return (times[0] - began) * 1e3, (times[-1] - times[0]) * 1e3


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clips = render_clips(Path(folder), NUM_CLIPS)
        for mode in MODES:
            with running_cluster() as cluster, server_alone(f"--speculation={mode}") as alone:
                cluster.add_node(num_cpus=2, num_gpus=1)
                client = cluster.serve("--engines=1", "--frontends=1", f"--speculation={mode}")
                for name, (first_ms, rest_ms) in medians(clips, {"serve": alone, "serve-ray": client}).items():
                    say(f"{mode:5} {name:10} first token {first_ms:6.1f} ms, 79 more {rest_ms:6.1f} ms")


def medians(clips: list[Path], servers: dict[str, httpx.Client]) -> dict[str, list[float]]:
    """The medians of `ask`, for each server."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for number, clip in enumerate(clips):
        for name in sorted(servers, reverse=number % 2 == 1):
            ask(servers[name], clip, FIRST)
            times = ask(servers[name], clip, SECOND)
            found[name] += [times] if number >= WARM_UP else []
    return {name: [statistics.median(column) for column in zip(*of_one, strict=True)] for name, of_one in found.items()}


if __name__ == "__main__":
    main()
