"""Answers on a Ray cluster survive the loss of engines and nodes and a new version, word for word."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.component.cluster.ray_cluster import (
    RayCluster,
    children,
    command_of,
    kill,
    running_cluster,
    server_alone,
    until,
)
from tests.component.cluster.streams import ask_all, ask_until_done, render_clips

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STREAMS = 8
NUM_KILLS = 20


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return render_clips(tmp_path_factory.mktemp("clips"), NUM_STREAMS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running_cluster() as cluster:
        cluster.add_node(num_cpus=2)  # for frontends
        for _ in range(2):
            cluster.add_node(num_gpus=1)
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: RayCluster) -> httpx.Client:
    served = cluster.serve("--engines=2", "--engine-drain-s=1")
    until(lambda: len(cluster.engines()) == 2, "two engines")
    return served


@pytest.fixture(scope="module")
def wanted(clips: list[Path]) -> list[str]:
    """The texts of a server without a cluster."""
    with server_alone() as alone:
        texts, _ = ask_all(alone, clips)
    assert len(set(texts)) == NUM_STREAMS
    return texts


def workers_of(engine: psutil.Process) -> list[psutil.Process]:
    """The engine's processes that hold a model, without the fork server."""
    from_one = [each for each in children(engine) if "engine.fork_server" in command_of(each)]
    return [each for each in from_one if each.parent() in from_one]


def busiest(found: list[psutil.Process], cpu_s: Callable[[psutil.Process], float]) -> psutil.Process:
    before = [cpu_s(each) for each in found]
    time.sleep(0.3)  # noqa: TID251
    return max(found, key=lambda each: cpu_s(each) - before[found.index(each)])


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def test_a_cluster_says_what_a_single_server_says(client: httpx.Client, clips: list[Path], wanted: list[str]) -> None:
    assert ask_all(client, clips)[0] == wanted


def test_a_second_server_on_a_cluster_is_refused_and_the_first_goes_on(
    cluster: RayCluster, client: httpx.Client
) -> None:
    second = cluster.serve_twice()
    assert (second.returncode, second.stdout) == (2, "")
    assert "another `vidspec serve-ray` serves on this Ray cluster" in second.stderr
    assert client.get("/v1/models").status_code == 200


def test_every_node_shows_what_its_engines_do(cluster: RayCluster, client: httpx.Client, clips: list[Path]) -> None:
    ask_all(client, clips)

    def forwards() -> set[str]:
        """The replicas that report forward passes."""
        found = cluster.metrics().splitlines()
        counts = [line for line in found if line.startswith("ray_vidspec_target_forward_seconds_count{")]
        return {re.search(r'replica="([^"]+)"', line)[1] for line in counts if not line.endswith(" 0.0")}  # type: ignore[index]

    until(lambda: len(forwards()) == 2, "figures of both engines")
    page = cluster.metrics()
    for name in ("worker_idle_ratio", "kv_cache_usage_perc", "spec_decode_num_accepted_tokens_per_pos_total"):
        assert f"ray_vidspec_{name}{{" in page


@pytest.mark.parametrize("n", [3, 8])
def test_several_answers_to_one_prompt_are_those_of_their_seeds(
    n: int, client: httpx.Client, clips: list[Path]
) -> None:
    def texts(n: int, seed: int) -> list[str]:
        asked = {
            "prompt": "Describe the video.",
            "temperature": "1",
            "max_tokens": "40",
            "seed": str(seed),
            "n": str(n),
        }
        answer = client.post("/v1/video-chat", data=asked, files={"video": clips[0].read_bytes()})
        assert answer.status_code == 200, answer.text
        return [choice["message"]["content"] for choice in answer.json()["choices"]]

    assert texts(n, 5) == [text for seed in range(5, 5 + n) for text in texts(1, seed)]


def test_several_prompts_of_one_request_are_all_answered(client: httpx.Client) -> None:
    prompts = [f"There are {number}" for number in range(20)]

    def texts(prompt: object) -> list[str]:
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20, "n": 2, "temperature": 0})
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    assert texts(prompts) == [text for prompt in prompts for text in texts(prompt)]


def test_whatever_is_killed_under_streams_no_word_is_another(
    cluster: RayCluster,
    client: httpx.Client,
    clips: list[Path],
    wanted: list[str],
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    """Kill a worker, an engine and a node in turn, each time the one that serves more streams."""
    pauses: dict[str, list[float]] = {"worker": [], "engine": [], "node": []}
    for what in itertools.islice(itertools.cycle(pauses), NUM_KILLS):

        def strike(what: str = what) -> None:
            engine = busiest(cluster.engines(), lambda each: sum(map(cpu_s, workers_of(each))))
            workers = workers_of(engine)
            if what == "worker":
                kill(busiest(workers, cpu_s))
            elif what == "engine":
                kill(engine)
                until(lambda: not any(each.is_running() for each in workers), "the workers of a killed engine to end")
            else:
                cluster.kill_node_of(engine)

        texts, streams = ask_all(client, clips, strike)
        assert texts == wanted, what
        pauses[what] += [stream.longest_pause_s for stream in streams]
        if what == "node":
            cluster.add_node(num_gpus=1)
        until(lambda: len(cluster.engines()) == 2, "two engines again")
    for what, found in pauses.items():
        record_testsuite_property(f"pause_{what}", [round(statistics.median(found), 2), round(max(found), 2)])


def test_an_engine_whose_target_does_not_come_back_hands_its_answers_to_another(
    cluster: RayCluster, client: httpx.Client, clips: list[Path], wanted: list[str]
) -> None:
    def strike() -> None:
        engine = busiest(cluster.engines(), lambda each: sum(map(cpu_s, workers_of(each))))

        def has_ended() -> bool:
            for worker in workers_of(engine):
                kill(worker)
            return engine not in cluster.engines()

        until(has_ended, "the engine to give up")

    assert ask_all(client, clips, strike)[0] == wanted
    until(lambda: len(cluster.engines()) == 2, "two engines again")


def test_a_new_version_is_deployed_under_load_without_a_failed_request_or_a_changed_word(
    cluster: RayCluster, client: httpx.Client, clips: list[Path], wanted: list[str]
) -> None:
    before = {engine.pid for engine in cluster.engines()}
    num_lost = cluster.log().count("is_planned=false")
    texts = ask_until_done(client, clips, lambda: cluster.update(engines="2", log_level="warning"))
    assert texts == [[text] * len(told) for text, told in zip(wanted, texts, strict=True)]
    assert min(map(len, texts)) > 1
    assert not before & {engine.pid for engine in cluster.engines()}
    log = cluster.log()
    assert "is_planned=true" in log, "no stream was under way on an engine that was replaced"
    assert log.count("is_planned=false") == num_lost
