"""What the routes are given; the engine and the decoder are seams behind which tests put fakes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vidspec_service.api.admission import Admission
from vidspec_service.decoding.clip import Clip
from vidspec_service.decoding.frame_request import FrameRequest
from vidspec_service.engine.interface import Engine
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics


class Decoder(Protocol):
    """What the api asks of `decoding.pool.DecodePool`."""

    async def decode(self, path: Path, request: FrameRequest, default_num_frames: int) -> Clip:
        """Choose and decode frames of the file at `path`; raises VideoError. Cancelling stops the decode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Every collaborator of a route, built once by `create_app` and handed to the routers."""

    settings: Settings
    engine: Engine
    decoder: Decoder
    metrics: Metrics
    admission: Admission
    upload_dir: Path
