"""The collaborators that routes get. Tests replace the engine and the decoder by fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network
from pathlib import Path

from starlette.requests import Request
from starlette.types import Receive

from vidspec_service import __version__
from vidspec_service.api.grammars.checker import GrammarChecker
from vidspec_service.api.limits.admission import ANYONE, Admission, FairQueue, Permit, caller_of, share_key_var
from vidspec_service.api.limits.callers import ApiKeys
from vidspec_service.api.limits.deadline import Deadline
from vidspec_service.api.store.clip_cache import ClipCache, Decode
from vidspec_service.api.store.local import LocalVideoStore
from vidspec_service.api.store.shared import SharedVideoStore
from vidspec_service.api.store.video_store import VideoStore
from vidspec_service.api.uploads.fetching import Fetcher
from vidspec_service.engine.frontend.interface import Engine
from vidspec_service.settings import Settings, api_keys
from vidspec_service.telemetry import Metrics, Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Remotes:
    """Optional services that an operator runs beside ours; built before models are loaded."""

    traces: Traces | None = None
    videos: SharedVideoStore | None = None


@asynccontextmanager
async def open_remotes(settings: Settings) -> AsyncIterator[Remotes]:
    """Opens what the settings name; raises ConfigError for what is missing. At the end the last traces are sent."""
    store = None if settings.video_store is None else SharedVideoStore(settings.video_store, settings.video_ttl_s)
    if store is not None:
        await store.check()
    endpoint = settings.otlp_traces_endpoint
    traces = None if endpoint is None else Traces(endpoint, __version__)
    with nullcontext() if traces is None else closing(traces):
        yield Remotes(traces=traces, videos=store)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Every collaborator of a route, built once by `build_services` and handed to the routers."""

    settings: Settings
    engine: Engine
    clips: ClipCache
    videos: VideoStore
    fetcher: Fetcher
    grammars: GrammarChecker
    metrics: Metrics
    admission: Admission
    queue: FairQueue  # for decoding and generation
    upload_dir: Path
    keys: ApiKeys
    traces: Traces | None

    def permit(self, request: Request) -> AbstractContextManager[Permit]:
        """See `Admission.permit`. Without API keys, the request counts against the share of its client address."""
        caller, client = caller_of(request), request.client
        share_key = caller or (ANYONE if client is None else _network_of(client.host))
        share_key_var.set(share_key)
        return self.admission.permit(caller, share_key)

    def deadline(self, permit: Permit, receive: Receive) -> Deadline:
        """The deadline of a request whose body has arrived."""
        return Deadline(self.settings.request_timeout_s, permit.closing, receive, lambda: self.engine.status().outage_s)


def build_services(
    settings: Settings,
    engine: Engine,
    decode: Decode,
    metrics: Metrics,
    upload_dir: Path,
    remotes: Remotes,
) -> Services:
    """Starts nothing and reads only the file of keys. Kept videos are files in `upload_dir`, and go with it.

    Raises ConfigError for bad keys.
    """
    keys = ApiKeys(api_keys(settings))
    clips = ClipCache(settings, decode, metrics)
    return Services(
        settings=settings,
        engine=engine,
        clips=clips,
        videos=VideoStore(
            LocalVideoStore(settings.max_stored_bytes, settings.video_ttl_s, clips.forget), remotes.videos
        ),
        fetcher=Fetcher(settings),
        grammars=GrammarChecker(),
        metrics=metrics,
        admission=Admission(settings, metrics, are_several=len(keys) != 1),  # with no keys: addresses
        # Slots for requests that generate, and for those whose videos are decoded meanwhile.
        queue=FairQueue(settings.max_running_requests + settings.decode_workers, are_shared=len(keys) > 1),
        upload_dir=upload_dir,
        keys=keys,
        traces=remotes.traces,
    )


def _network_of(host: str) -> str:
    """The /64 of an IPv6 address, all of which one client usually has; any other host as it is."""
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or IPv6Network((int(address), 64), strict=False))
