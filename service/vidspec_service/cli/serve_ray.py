"""Serve from a Ray cluster until SIGTERM or Ctrl-C with --engines engines; answers survive the loss of an engine."""

from __future__ import annotations

import argparse
import logging
import math
import re
import signal
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress

from vidspec_service.cli.ray_address import join_cluster, require_ray
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import say
from vidspec_service.end_signals import interrupt_at_signals, obeyed_signals
from vidspec_service.engine.frontend.workers import check_models
from vidspec_service.errors import ConfigError
from vidspec_service.loopback import listen_url
from vidspec_service.settings import ClusterSettings, ReplicaRange, api_keys, engine_config
from vidspec_service.telemetry import configure_logging

_log = logging.getLogger(__name__)

_APP = "vidspec"
# Keeps a cluster of our own off the network; Ray would replace 127.0.0.1 with the machine's address.
_LOOPBACK = "127.0.0.2"
_RAY_DELETE_TIMEOUT_S = 60.0  # for an application to be deleted; goes on deleting after that
_SPARE_CPUS = 2  # of a cluster of our own, for Ray's own actors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of `vidspec serve`, and those of the cluster."""
    add_settings_flags(parser, ClusterSettings)


def run(args: argparse.Namespace) -> int:
    """Serve; 0 after an orderly end."""
    interrupt_at_signals()
    settings = settings_of(ClusterSettings, args)
    configure_logging(settings.log_level, settings.log_format)
    api_keys(settings)
    if settings.port == 0:
        raise ConfigError("--port: a cluster needs the same one on every node, not 0")
    if settings.ray_address is None:  # else engines run on other machines, too, and look for themselves
        check_models(engine_config(settings))
    require_ray()
    import ray
    from ray import serve
    from ray.exceptions import RayError

    from vidspec_service.cluster.application import application_of

    with suppress(KeyboardInterrupt), ExitStack() as held:
        held.callback(ray.shutdown)  # a cluster of our own ends with us
        try:
            _join(settings)
            held.callback(ray.kill, _claim())
            interrupt_at_signals()  # Ray's own handler prints a stack and may abort
            serve.start(http_options={"host": settings.host, "port": settings.port, "location": "EveryNode"})
            held.callback(_remove, settings)
            serve.run(application_of(settings), name=_APP, route_prefix="/")
        except (ConnectionError, TimeoutError, RuntimeError, RayError) as error:
            raise ConfigError(f"the cluster cannot serve: {why(error, _messages())}") from error
        announce(settings)
        _wait_for_signal()
    return 0


def _messages() -> list[str]:
    """What Ray says of each deployment: of one that did not start, the last traceback."""
    from ray import serve

    with suppress(Exception):  # whatever Ray raises where it does not even run
        return [each.message for app in serve.status().applications.values() for each in app.deployments.values()]
    return []


def why(error: Exception, messages: Iterable[str]) -> str:
    """Our own reason, if there is one in the messages: Ray's error only names the deployment that did not start."""
    ours = re.findall(r"ConfigError: (.+)", "\n".join(messages))
    return ours[-1] if ours else (str(error).strip() or repr(error)).splitlines()[-1]


def _remove(settings: ClusterSettings) -> None:
    """Take the application from the cluster once its running answers have ended, or `drain_timeout_s` is over."""
    from ray import serve

    for _ in range(1 + math.ceil(settings.drain_timeout_s / _RAY_DELETE_TIMEOUT_S)):
        with suppress(TimeoutError):
            serve.delete(_APP)
            return


def _join(settings: ClusterSettings) -> None:
    """Join the cluster that is named, or start one of our own on this machine, which ends with us."""
    if settings.ray_address is not None:
        join_cluster(settings.ray_address)
        return
    engines, frontends = ReplicaRange.parse(settings.engines), ReplicaRange.parse(settings.frontends)
    # For Ray, processors are only a number: we state as many as are asked for, so that a small machine suffices.
    num_cpus = engines.max * settings.engine_cpus + frontends.max * settings.frontend_cpus + _SPARE_CPUS
    join_cluster("local", _node_ip_address=_LOOPBACK, num_cpus=math.ceil(num_cpus), include_dashboard=False)


class _Server:
    """An actor with nothing to do: it lives as long as the `vidspec serve-ray` that has made it."""


def _claim() -> object:
    """Take the cluster, which has one address and so one server; it is ours as long as what is returned is kept.

    Raises ConfigError while another `vidspec serve-ray` serves there. What a killed one has left is taken over.
    """
    import ray

    actor = ray.remote(num_cpus=0)(_Server)
    try:
        return actor.options(name=_APP, namespace=_APP).remote()
    except ValueError as error:  # the name is taken
        raise ConfigError(
            "another `vidspec serve-ray` serves on this Ray cluster, which has one address: end that one first, "
            "or start a cluster of its own for this one (ray start --head)"
        ) from error


def announce(settings: ClusterSettings) -> None:
    """Tell where the service listens, and who can use it."""
    if not api_keys(settings) and settings.host not in ("127.0.0.1", "::1", "localhost"):
        _log.warning("no API keys are set: anyone who can reach this address can use the server")
    url = listen_url(settings.host, settings.port)
    if settings.log_format == "json":  # nothing but JSON for a log shipper
        _log.info("ready", extra={"url": url, "engines": settings.engines})
    else:
        say(f"vidspec serves on Ray at {url} (engines: {settings.engines})")


def _wait_for_signal() -> None:
    asked_to_end = threading.Event()
    for number in obeyed_signals():
        signal.signal(number, lambda *_: asked_to_end.set())
    asked_to_end.wait()
    interrupt_at_signals()  # the next one skips the wait for running answers
