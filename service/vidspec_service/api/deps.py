"""What the routes are given; the engine and the decoder are seams behind which tests put fakes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vidspec_service.api.admission import Admission
from vidspec_service.api.clips import Clips
from vidspec_service.api.fetching import Fetcher
from vidspec_service.api.turns import Turns
from vidspec_service.api.videos import Videos
from vidspec_service.engine.interface import Engine
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Every collaborator of a route, built once by `services.build_services` and handed to the routers."""

    settings: Settings
    engine: Engine
    clips: Clips
    videos: Videos
    fetcher: Fetcher
    metrics: Metrics
    admission: Admission
    turns: Turns
    upload_dir: Path

    @property
    def default_num_frames(self) -> int:
        """Frames of requests that do not say; raises EngineDead while only the model could tell."""
        return self.settings.default_num_frames or self.engine.info.default_num_frames
