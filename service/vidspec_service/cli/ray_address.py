"""The Ray cluster that a command works on: found, or a line that says why not."""

from __future__ import annotations

import os
import socket
from typing import Any

from vidspec_service.errors import ConfigError

_TIMEOUT_S = 5.0


def join_cluster(address: str, **more: Any) -> None:
    """After `require_ray`: connect to `auto`, `local` or HOST:PORT; `more` is for `ray.init`. Raises ConfigError."""
    import ray

    _check_reachable(address)
    try:
        ray.init(address=address, logging_level="warning", **more)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot join the Ray cluster: {error}") from error


def require_ray() -> None:
    """Called before Ray is imported: by default Ray reports its usage to its makers. Raises ConfigError without Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # noqa: TID251  Ray's own setting, not ours
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("a cluster needs Ray: pip install 'vidspec[ray]'") from None


def _check_reachable(address: str) -> None:
    """Raises ConfigError where Ray would try for minutes. Checks HOST:PORT only, not `auto` or other names of Ray's."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), _TIMEOUT_S).close()
    except (OSError, OverflowError, ValueError) as error:  # ValueError: a host or port that cannot be one
        raise ConfigError(f"--ray-address: there is no cluster at {address}: {error}") from None
