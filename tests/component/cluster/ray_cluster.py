"""RayCluster: several nodes of Ray on this machine, each on a loopback address of its own, and `vidspec serve-ray`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil

_HEAD = "127.0.0.2"
_TIMEOUT_S = 120.0
_APPLICATION = "vidspec_service.cluster.application:application"
_RAY = Path(sys.executable).with_name("ray")
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_period_ms": "500",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # as deploy/kubernetes has it
}


# An engine needs a "GPU", which a test gives to nodes: so it says where engines are.
ENGINE = {"engine-gpus": "1", "engine-cpus": "0", "target-dtype": "float32", "draft-dtype": "float32"}


class RayCluster:
    """Started by `running_cluster`, which ends all of it."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held
        # Ray's sockets lie in it, whose paths must be short.
        self._folder = held.enter_context(tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True))
        self._environment = {**os.environ, **_QUIET, **_haproxy_in(Path(self._folder))}  # noqa: TID251
        self._nodes: list[psutil.Process] = []
        self._metrics_ports: list[int] = []
        self._port = free_port()
        self.url = ""
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{_HEAD}:{self._port}"

    def add_node(self, *, num_cpus: int = 0, num_gpus: int = 0) -> psutil.Process:
        """The first is the head. Its `ray start`, whose children are the node's processes.

        Neither number means anything but what may be placed there: a GPU a place for an engine.
        """
        is_head = not self._nodes
        command = [str(_RAY), "start", "--block", f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}"]
        self._metrics_ports.append(free_port())
        command += [f"--metrics-export-port={self._metrics_ports[-1]}", "--object-store-memory=100000000"]
        command += [f"--node-ip-address=127.0.0.{2 + len(self._nodes)}"]
        if is_head:
            command += ["--head", f"--port={self._port}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        else:
            command += [f"--address={self.address}"]
        process = subprocess.Popen(
            command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._held.callback(end, process)
        node = psutil.Process(process.pid)
        self._nodes.append(node)
        until(lambda: any("raylet" in each.name() for each in children(node)), "a raylet")
        return node

    def serve(self, *flags: str) -> httpx.Client:
        """`vidspec serve-ray`, until it is ready."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        # Nodes of one machine cannot all listen on one port; and what a test ends must not be what it listens to.
        self._serve("start", f"--http-port={port}", "--proxy-location=HeadOnly")
        command = [sys.executable, "-m", "vidspec_service", "serve-ray", f"--port={port}", *flags]
        command += [f"--ray-address={self.address}", *(f"--{name}={value}" for name, value in ENGINE.items())]
        log = self._held.enter_context((Path(self._folder) / "serve-ray.log").open("wb"))
        self._server = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log, start_new_session=True)
        self._held.callback(end, self._server)
        client = self._held.enter_context(httpx.Client(base_url=self.url, timeout=_TIMEOUT_S))
        until(lambda: self._is_ready(client), "readiness")
        return client

    def update(self, **settings: str) -> None:
        """Deploy anew with other settings, as `serve deploy` would; back when the new ones serve."""
        asked = {name.replace("-", "_"): value for name, value in ENGINE.items()} | settings
        values = [f"{name}={value}" for name, value in asked.items()]
        self._serve("run", "--non-blocking", "--name=vidspec", "--route-prefix=/", _APPLICATION, *values)

    def _serve(self, command: str, *words: str) -> None:
        """Ray Serve's own command line."""
        line = [str(_RAY.with_name("serve")), command, f"--address={self.address}", *words]
        done = subprocess.run(line, env=self._environment, timeout=_TIMEOUT_S, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def _is_ready(self, client: httpx.Client) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, self.log()
        return is_ready(client)

    def engines(self) -> list[psutil.Process]:
        """The processes of Ray Serve's that hold an engine."""
        return [each for each in self.processes() if "ServeReplica:vidspec:Engine" in command_of(each)]

    def processes(self) -> list[psutil.Process]:
        """All of all nodes."""
        return [each for node in self._nodes for each in children(node)]

    def metrics(self) -> str:
        """The pages of all nodes, one after the other, without those that have none yet."""
        pages = []
        for number, port in enumerate(self._metrics_ports):
            with suppress(httpx.TransportError):
                pages.append(httpx.get(f"http://127.0.0.{2 + number}:{port}/metrics", timeout=_TIMEOUT_S).text)
        return "\n".join(pages)

    def log(self) -> str:
        """What the server and all its processes said."""
        return (Path(self._folder) / "serve-ray.log").read_text()

    def kill_node_of(self, process: psutil.Process) -> None:
        """All its processes at once, as when a machine is switched off."""
        node = next(node for node in self._nodes if process in children(node))
        for each in [*children(node), node]:
            kill(each)


def _haproxy_in(folder: Path) -> dict[str, str]:
    """Where it keeps its files and what it listens to besides; by default it is one to a machine."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "haproxy.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "haproxy-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }


@contextmanager
def running_cluster() -> Iterator[RayCluster]:
    """A cluster without nodes; what is added ends with the block."""
    with ExitStack() as held:
        yield RayCluster(held)


@contextmanager
def server_alone(*flags: str) -> Iterator[httpx.Client]:
    """`vidspec serve`, without a cluster, with the same models."""
    port = free_port()
    same = [f"--{name}={value}" for name, value in ENGINE.items() if not name.startswith("engine")]
    command = [sys.executable, "-m", "vidspec_service", "serve", f"--port={port}", *same, *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S) as client:
            until(lambda: is_ready(client), "a server")
            yield client
    finally:
        end(process)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def until(is_so: Callable[[], bool], what: str, timeout_s: float = _TIMEOUT_S) -> None:
    """Wait for what other processes do."""
    ends_at = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < ends_at, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)  # noqa: TID251


def end(process: subprocess.Popen[bytes]) -> None:
    """It and all that it started, at once."""
    for each in children(psutil.Process(process.pid)) if process.poll() is None else []:
        kill(each)
    process.kill()
    process.wait()


def kill(process: psutil.Process) -> None:
    """-9; fine if it has gone."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
