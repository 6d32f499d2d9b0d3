"""Load the models and answer over HTTP until SIGTERM or Ctrl-C; then finish running requests and stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from vidspec_service import __version__
from vidspec_service.cli.chat import DEFAULT_URL
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import loading_display, say
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.end_signals import interrupt_at_signals
from vidspec_service.engine.frontend.interface import Engine, EngineInfo
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.frontend.supervisor import WorkerLauncher
from vidspec_service.engine.frontend.workers import check_models
from vidspec_service.errors import ConfigError
from vidspec_service.loopback import listen_url
from vidspec_service.settings import Settings, decoding_limits, engine_config, with_keys_read
from vidspec_service.telemetry import Metrics, configure_logging

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """The parts of a running service, other than HTTP."""

    metrics: Metrics
    engine: Engine
    decode_pool: DecodePool
    load_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings, and the other arguments that `vllm serve` has."""
    parser.add_argument("target", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument(
        "--api-key",
        dest="api_keys",
        metavar="KEY",
        help="API key that callers must send, or several separated by commas; other users of this machine can read a "
        "command line, so prefer --api-key-file",
    )
    add_settings_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve; 0 after an orderly end, also by a signal while the models are loaded."""
    interrupt_at_signals()
    settings = settings_for(args)
    configure_logging(settings.log_level, settings.log_format)
    if args.api_keys is not None:
        _log.warning("an API key is on the command line, where others on this machine can read it")
    settings = with_keys_read(settings)  # raises ConfigError: a bad key is reported before minutes of loading
    with closing(WorkerLauncher(settings.log_format)) as launcher, suppress(KeyboardInterrupt):
        launcher.start()  # imports what workers need, which takes seconds: meanwhile we import the API
        asyncio.run(_serve(settings, launcher))
    return 0


def settings_for(args: argparse.Namespace) -> Settings:
    """The settings, with MODEL taken as --model; raises ConfigError."""
    if args.target is not None:
        if args.model not in (None, args.target):
            raise ConfigError(f"the model is given twice: {args.target} and --model {args.model}")
        args.model = args.target
    return settings_of(Settings, args)


@asynccontextmanager
async def running_service(settings: Settings, launcher: WorkerLauncher) -> AsyncIterator[RunningService]:
    """Engine and decode pool for these settings, ready; ended with the block, the launcher excepted.

    Raises ConfigError.
    """
    config = engine_config(settings)
    check_models(config)
    metrics = Metrics(CollectorRegistry())
    began = time.monotonic()
    _log.info("loading", extra={"model": config.target.model, "draft_model": config.draft and config.draft.model})
    async with AsyncExitStack() as stack:
        with loading_display() as tell:
            engine = await stack.enter_async_context(LocalEngine(config, metrics, on_loading=tell, launcher=launcher))
            if (reason := engine.info.why_not(settings.compression)) is not None:
                raise ConfigError(f"--compression: {reason}")
            limits = decoding_limits(settings, engine.info.default_num_frames)
            decode_pool = await stack.enter_async_context(DecodePool(limits, settings.decode_workers))
        load_s = time.monotonic() - began
        yield RunningService(metrics=metrics, engine=engine, decode_pool=decode_pool, load_s=load_s)


async def _serve(settings: Settings, launcher: WorkerLauncher) -> None:
    """The composition root: with `running_service`, every object of a running service is built here, once."""
    from vidspec_service.api.server import bind, listen, serve
    from vidspec_service.api.services import open_remotes
    from vidspec_service.api.uploads.folder import check_upload_dir

    # Before minutes of loading, so that a missing package, folder or port is reported at once.
    check_upload_dir(settings.upload_dir)
    with bind(settings) as listener:
        async with open_remotes(settings) as remotes, running_service(settings, launcher) as service:
            listen(listener)
            info = service.engine.info
            devices = {f"{role}_device": device for role, device in info.devices.items()}
            models = {"model": info.model, "draft_model": info.draft_model or ""}
            service.metrics.build.info({"version": __version__, **models, **devices, **info.versions})
            _warn_of_fallbacks(service)
            _warn_of_limits(settings, info)
            announce(settings, service, listen_url(*listener.getsockname()[:2]))
            await serve(settings, service.engine, service.decode_pool.decode, service.metrics, listener, remotes)


def _warn_of_fallbacks(service: RunningService) -> None:
    """Warn of what makes steps several times slower, and tell the remedy."""
    for role, path in service.engine.status().step_paths.items():
        if path.fallback:
            facts = {"worker": role, "why": path.fallback, "remedy": path.remedy}
            _log.warning("decoding steps are several times slower than they should be", extra=facts)


def _warn_of_limits(settings: Settings, info: EngineInfo) -> None:
    """Warn if more is configured than the model takes."""
    if settings.max_context is not None and settings.max_context > info.context_length:
        facts = {"max_context": settings.max_context, "context_length": info.context_length}
        _log.warning("the context is shorter than asked: the model, or its KV cache, has no more", extra=facts)
    asked, most = settings.default_num_frames, info.max_frames
    if asked is not None and most is not None and asked > most:
        facts = {"default_num_frames": asked, "max_frames": most}
        _log.warning("the model was made for fewer frames per video: it gets no more than those", extra=facts)


def announce(settings: Settings, service: RunningService, url: str) -> None:
    """Tell where the service listens and, to a person, what to do next."""
    info = service.engine.info
    if info.default_sampling:
        _log.info("requests without sampling settings use those of the checkpoint", extra=info.default_sampling)
    if settings.log_format == "json":  # nothing but JSON for a log shipper
        facts = {"url": url, "model": info.model, "devices": info.devices, "load_s": round(service.load_s, 3)}
        _log.info("ready", extra=facts)
        return
    devices = ", ".join(f"{role} on {device}" for role, device in info.devices.items())
    say(f"vidspec {__version__} serves {info.model} at {url}  ({devices}; loaded in {service.load_s:.1f} s)")
    where = "" if url.replace("localhost", "127.0.0.1") == DEFAULT_URL else f" --url {url}"
    say(f"Open {url} in a browser, or ask it about a clip:")
    say(f"  {_own_command()} render-clip --seed 6 clip.mp4")
    say(f"  {_own_command()} chat clip.mp4 'How many objects are there?'{where}")
    say(f"Every route, with examples: {url}/docs")


def _own_command() -> str:
    """What to type to get this program: without an activated environment, the path under which it was started."""
    path = Path(sys.argv[0])
    return str(path) if path.name == "vidspec" and shutil.which("vidspec") is None else "vidspec"
