"""Where a cluster sends requests: to the engine that has their video, or to one that is started; and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.component.cluster.ray_cluster import RayCluster, command_of, kill, running_cluster, until
from tests.component.cluster.streams import ask_all, render_clips

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_VIDEOS = 24
NUM_ENGINES = 4


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with running_cluster() as cluster:
        cluster.add_node(num_cpus=2, num_gpus=NUM_ENGINES)
        yield cluster


def found_again(client: httpx.Client, videos: list[str], prompt: str) -> list[bool]:
    """For each video: whether the engine that answered had it cached."""

    def answered(video: str) -> bool:
        # A new connection each time, so that any frontend may get the request.
        headers = {"connection": "close"}
        asked = {"video_id": video, "prompt": prompt, "max_tokens": 4}
        answer = client.post("/v1/video-chat", json=asked, headers=headers)
        assert answer.status_code == 200, answer.text
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached > 0

    return [answered(video) for video in videos]


def test_follow_ups_land_where_their_video_is_and_few_move_when_an_engine_is_lost(
    cluster: RayCluster, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    store = f"--video-store=file://{tmp_path / 'store'}"
    client = cluster.serve(f"--engines={NUM_ENGINES}", "--frontends=2", "--speculation=off", store)
    until(lambda: len(cluster.engines()) == NUM_ENGINES, "all engines")
    videos = []
    for clip in render_clips(tmp_path, NUM_VIDEOS):
        kept = client.post("/v1/videos", files={"video": clip.read_bytes()})
        videos.append(kept.json()["id"])
    assert not any(found_again(client, videos, "Describe the video."))
    again = found_again(client, videos, "How many objects are there?")
    assert all(again)
    kill(cluster.engines()[0])
    stayed = found_again(client, videos, "Which colours are there?")
    record_testsuite_property("follow_ups", [sum(again), sum(stayed), NUM_VIDEOS])
    # A quarter is expected to move. If half or more of the 24 moved, videos of engines that survived moved, too.
    assert NUM_VIDEOS // 2 < sum(stayed) < NUM_VIDEOS


def test_engines_sleep_while_nobody_asks_and_the_first_request_wakes_one(cluster: RayCluster, tmp_path: Path) -> None:
    client = cluster.serve("--engines=0-1", "--speculation=off", "--engine-idle-s=5")
    (clip,) = render_clips(tmp_path, 1)
    until(lambda: not cluster.engines(), "the engine to end")
    assert client.get("/health/ready").status_code == 200
    answer = client.post("/v1/video-chat", data={"prompt": "Describe the video."}, files={"video": clip.read_bytes()})
    assert answer.status_code == 200, answer.text
    assert cluster.engines(), [command_of(each) for each in cluster.processes()]


def test_answers_that_have_begun_are_finished_when_the_command_is_asked_to_end(
    cluster: RayCluster, tmp_path: Path
) -> None:
    client = cluster.serve("--engines=1")
    clips = render_clips(tmp_path, 2)
    wanted, _ = ask_all(client, clips, num_tokens=2000)
    assert ask_all(client, clips, cluster.ask_to_end, num_tokens=2000)[0] == wanted
    assert cluster.exit_code() == 0
