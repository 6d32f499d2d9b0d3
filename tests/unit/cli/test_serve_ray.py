"""Whatever keeps a cluster from serving is reported immediately, in one line."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vidspec_service.__main__ import main
from vidspec_service.cli import serve_ray
from vidspec_service.cli.parsing import parse
from vidspec_service.cli.serve_ray import announce, why
from vidspec_service.end_signals import END_SIGNALS
from vidspec_service.errors import ConfigError
from vidspec_service.settings import ClusterSettings


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the process-wide changes of the command: logging and an environment variable of Ray."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def refused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_an_address_without_a_cluster_is_told_before_ray_tries_for_minutes() -> None:
    command, args = parse(["serve-ray", "--ray-address", f"127.0.0.1:{refused_port()}"])
    with pytest.raises(ConfigError, match=r"there is no cluster at 127\.0\.0\.1"):
        command.run(args)


@pytest.mark.parametrize("address", ["a..b:6379", "127.0.0.1:99999", "127.0.0.1:²", "head", "head:"])
def test_an_address_that_cannot_be_one_is_refused_in_words(address: str) -> None:
    command, args = parse(["serve-ray", "--ray-address", address])
    with pytest.raises(ConfigError, match=r"there is no cluster at|cannot join the Ray cluster"):
        command.run(args)


@pytest.mark.parametrize(("frontends", "frontend_cpus", "for_frontends"), [("1", 0.2, 0.2), ("2-4", 3, 12)])
def test_a_cluster_of_our_own_has_processors_for_all_that_it_may_run(
    monkeypatch: pytest.MonkeyPatch, frontends: str, frontend_cpus: float, for_frontends: float
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(serve_ray, "join_cluster", lambda address, **more: given.update(more, address=address))
    serve_ray._join(ClusterSettings(engines="1-3", engine_cpus=0.75, frontends=frontends, frontend_cpus=frontend_cpus))
    assert given["address"] == "local"
    assert given["num_cpus"] >= 3 * 0.75 + for_frontends + serve_ray._SPARE_CPUS


def test_a_model_that_is_not_there_is_told_before_a_cluster_is_started() -> None:
    command, args = parse(["serve-ray", "--model", "not_a_model"])
    with pytest.raises(ConfigError, match="not_a_model"):
        command.run(args)


@pytest.mark.parametrize("asked", [["--model", "/on/other/machines"], ["--target-device", "cuda:7"]])
def test_what_only_the_clusters_machines_have_is_not_looked_for_here(asked: list[str]) -> None:
    command, args = parse(["serve-ray", "--ray-address", f"127.0.0.1:{refused_port()}", *asked])
    with pytest.raises(ConfigError, match="there is no cluster at"):
        command.run(args)


def test_a_port_that_nobody_would_learn_is_refused() -> None:
    """Ray would pick one on each node, and tell none of them."""
    command, args = parse(["serve-ray", "--port", "0", "--model", "not_a_model"])
    with pytest.raises(ConfigError, match="--port: a cluster needs the same one on every node, not 0"):
        command.run(args)


def test_a_key_file_that_is_not_there_is_told_before_anything_else() -> None:
    command, args = parse(["serve-ray", "--api-key-file", "/nowhere/keys", "--model", "not_a_model"])
    with pytest.raises(ConfigError, match="/nowhere/keys"):
        command.run(args)


def test_a_cluster_that_logs_json_says_in_json_that_it_is_ready(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    announce(ClusterSettings(log_format="json", engines="2"))
    (record,) = caplog.records
    assert (record.message, vars(record)["url"], vars(record)["engines"]) == ("ready", "http://127.0.0.1:8000", "2")
    assert capsys.readouterr().out == ""
    for host, url in (
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://localhost:8000"),
        ("::1", "http://[::1]:8000"),
    ):
        announce(ClusterSettings(host=host))
        assert capsys.readouterr().out == f"vidspec serves on Ray at {url} (engines: 1)\n"


@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "::1"}, False),
        ({"host": "::", "api_keys": "key-0123456789abcdef"}, False),
    ],
)
def test_a_cluster_that_others_can_reach_and_that_asks_for_no_key_says_so(
    given: dict[str, Any], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    announce(ClusterSettings(**given))
    assert ("anyone who can reach this address" in caplog.text) is is_told


def test_the_first_signal_ends_the_wait_for_one_and_the_second_that_for_running_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Signalled(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            signal.raise_signal(signal.SIGTERM)
            return super().wait(0)

    monkeypatch.setattr("threading.Event", Signalled)
    before = {each: signal.getsignal(each) for each in END_SIGNALS}
    try:
        serve_ray._wait_for_signal()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_start_that_fails_is_json_where_logs_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vidspec", "serve-ray", "--log-format", "json", "--engines", "none"])
    assert main() == 2
    assert '"event": "cannot start"' in capsys.readouterr().err


def test_a_cluster_that_does_not_start_is_told_with_our_reason() -> None:
    """What Ray raises names a deployment only; the traceback of a deployment ends with what we raised."""
    error = RuntimeError("Deploying application vidspec failed:\nFailed to update the deployments ['Frontend'].\n")
    trace = (
        "Traceback:\n  raise ConfigError(reason)\nvidspec_service.errors.ConfigError: the folder is away\n. See logs"
    )
    assert why(error, ["", trace]) == "the folder is away"
    assert why(error, ["vidspec_service.errors.ConfigError: its cause\n", trace]) == "the folder is away"
    assert why(error, ["", "the node was lost"]) == "Failed to update the deployments ['Frontend']."
    assert why(TimeoutError(), []) == "TimeoutError()"
