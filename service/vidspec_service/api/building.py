"""build_services: every collaborator of the routes, made from settings."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from vidspec_service.api.admission import Admission
from vidspec_service.api.clips import Clips, Decoder
from vidspec_service.api.deps import Services
from vidspec_service.api.fetching import Fetcher
from vidspec_service.api.lru import Lru
from vidspec_service.api.rate_limit import RateLimit
from vidspec_service.api.turns import Turns
from vidspec_service.api.videos import Videos
from vidspec_service.engine.interface import Engine
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics


def build_services(
    settings: Settings,
    engine: Engine,
    decoder: Decoder,
    metrics: Metrics,
    upload_dir: Path | None = None,
    *,
    num_keys: int = 0,
) -> Services:
    """Nothing is started and no file is touched; whoever ends a server closes its `videos`.

    `num_keys` are in use; none: all callers are one.
    """
    clips = Clips(decoder, metrics, Lru(settings.max_cached_frame_bytes, settings.video_ttl_s, time.monotonic))
    # Wall clock: clients are told when a video expires.
    videos = Videos(settings.max_stored_bytes, settings.video_ttl_s, time.time, clips.forget)
    return Services(
        settings=settings,
        engine=engine,
        clips=clips,
        videos=videos,
        fetcher=Fetcher(
            settings.video_url_hosts or (),
            timeout_s=settings.video_url_timeout_s,
            max_bytes=settings.max_upload_bytes,
        ),
        metrics=metrics,
        admission=_admission(settings, metrics, num_keys),
        # As many as are generated, and those that are decoded meanwhile.
        turns=Turns(settings.max_running_requests + settings.decode_workers),
        upload_dir=upload_dir or settings.upload_dir or Path(tempfile.gettempdir()),
    )


def _admission(settings: Settings, metrics: Metrics, num_keys: int) -> Admission:
    return Admission(
        settings.max_running_requests + settings.max_queued_requests,
        settings.max_queued_bytes,
        metrics,
        several_callers=num_keys > 1,
        per_caller=settings.max_requests_per_key,
        rate=RateLimit(settings.requests_per_minute_per_key, time.monotonic),
    )
