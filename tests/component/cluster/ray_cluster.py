"""RayCluster: several Ray nodes on this machine, each on its own loopback address, and `vidspec serve-ray`."""

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
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # as in deploy/kubernetes
}


# An engine needs a "GPU"; by giving GPUs to nodes, a test decides where engines run.
ENGINE = {"engine-gpus": "1", "engine-cpus": "0", "target-dtype": "float32", "draft-dtype": "float32"}


class RayCluster:
    """Created by `running_cluster`, which ends all its processes."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held
        # A short path, since it is part of the paths of Ray's sockets.
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
        """Start a node (the first is the head) and return its `ray start`, the parent of the node's processes.

        The numbers only control what Ray may place on the node: one GPU stands for a place for one engine.
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
        """Start `vidspec serve-ray` and wait until it is ready; returns a client."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        # On one machine only one node can listen on the port; it must not be a node that a test ends.
        self._serve("start", f"--http-port={port}", "--proxy-location=HeadOnly")
        command = [*self._serve_ray(), f"--port={port}", *flags]
        command += [f"--{name}={value}" for name, value in ENGINE.items()]
        log = self._held.enter_context((Path(self._folder) / "serve-ray.log").open("wb"))
        self._server = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log, start_new_session=True)
        self._held.callback(end, self._server)
        client = self._held.enter_context(httpx.Client(base_url=self.url, timeout=_TIMEOUT_S))
        until(lambda: self._is_ready(client), "readiness")
        return client

    def serve_twice(self) -> subprocess.CompletedProcess[str]:
        """Run another `vidspec serve-ray` until it ends by itself."""
        return subprocess.run(
            self._serve_ray(), env=self._environment, timeout=_TIMEOUT_S, capture_output=True, text=True
        )

    def _serve_ray(self) -> list[str]:
        return [sys.executable, "-m", "vidspec_service", "serve-ray", f"--ray-address={self.address}"]

    def update(self, **settings: str) -> None:
        """Redeploy with other settings, as `serve deploy` does."""
        asked = {name.replace("-", "_"): value for name, value in ENGINE.items()} | settings
        values = [f"{name}={value}" for name, value in asked.items()]
        self._serve("run", "--non-blocking", "--name=vidspec", "--route-prefix=/", _APPLICATION, *values)

    def ask_to_end(self) -> None:
        """Send SIGTERM to `vidspec serve-ray`."""
        assert self._server is not None
        self._server.terminate()

    def exit_code(self) -> int:
        """Wait for the end of `vidspec serve-ray`."""
        assert self._server is not None
        return self._server.wait(_TIMEOUT_S)

    def _serve(self, command: str, *words: str) -> None:
        """Run Ray Serve's own command line."""
        line = [str(_RAY.with_name("serve")), command, f"--address={self.address}", *words]
        done = subprocess.run(line, env=self._environment, timeout=_TIMEOUT_S, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def _is_ready(self, client: httpx.Client) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, self.log()
        return is_ready(client)

    def engines(self) -> list[psutil.Process]:
        """The Ray Serve processes that hold an engine."""
        return [each for each in self.processes() if "ServeReplica:vidspec:Engine" in command_of(each)]

    def processes(self) -> list[psutil.Process]:
        """All processes of all nodes."""
        return [each for node in self._nodes for each in children(node)]

    def metrics(self) -> str:
        """The metrics pages of all nodes, joined; skips nodes that have none yet."""
        pages = []
        for number, port in enumerate(self._metrics_ports):
            with suppress(httpx.TransportError):
                pages.append(httpx.get(f"http://127.0.0.{2 + number}:{port}/metrics", timeout=_TIMEOUT_S).text)
        return "\n".join(pages)

    def log(self) -> str:
        """The log of the server and all its processes."""
        return (Path(self._folder) / "serve-ray.log").read_text()

    def kill_node_of(self, process: psutil.Process) -> None:
        """Kill all processes of its node at once, as if the machine were switched off."""
        node = next(node for node in self._nodes if process in children(node))
        for each in [*children(node), node]:
            kill(each)


def _haproxy_in(folder: Path) -> dict[str, str]:
    """HAProxy's files and additional ports; the defaults allow only one HAProxy per machine."""
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
    """A cluster without nodes; everything that is added ends with the block."""
    with ExitStack() as held:
        yield RayCluster(held)


@contextmanager
def server_alone(*flags: str) -> Iterator[httpx.Client]:
    """`vidspec serve` without a cluster, with the same models."""
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
    """Poll until `is_so`: other processes send no event."""
    ends_at = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < ends_at, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)  # noqa: TID251


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants."""
    for each in children(psutil.Process(process.pid)) if process.poll() is None else []:
        kill(each)
    process.kill()
    process.wait()


def kill(process: psutil.Process) -> None:
    """Send SIGKILL; a process that has already ended is no error."""
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
