"""What the parts below are built from: plain configurations, made from settings in one place each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vidspec_models.request import SpeculationMode
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.engine.config import DyCoke, EngineConfig, WorkerConfig
from vidspec_service.settings.fields import Settings

BUNDLED = "bundled"


def decoding_limits(settings: Settings) -> DecodingLimits:
    """What one video may cost, for the decode pool and the upload reader."""
    return DecodingLimits(
        max_bytes=settings.max_upload_bytes,
        max_duration_s=settings.max_duration_s,
        max_pixels=settings.max_pixels,
        max_frame_pixels=settings.max_frame_pixels,
        max_source_frames=settings.max_source_frames,
        max_frames=settings.max_frames,
        max_decoded_bytes=settings.max_decoded_bytes,
        timeout_s=settings.decode_timeout_s,
    )


def engine_config(settings: Settings) -> EngineConfig:
    """What the engine is built from: fields of the same name, and what is made of several."""
    same: dict[str, Any] = {name: getattr(settings, name) for name in Settings.model_fields}
    same = {field.name: same[field.name] for field in fields(EngineConfig) if field.name in same}
    dycoke = DyCoke(
        merge_ratio=settings.dycoke_merge_ratio, layer=settings.dycoke_layer, hide_ratio=settings.dycoke_hide_ratio
    )
    target = WorkerConfig(
        model=settings.model,
        revision=settings.revision,
        device=settings.target_device,
        dtype=settings.target_dtype,
        threads=settings.target_threads,
    )
    return EngineConfig(**{**same, "target": target, "draft": _draft_config(settings), "dycoke": dycoke})


def _draft_config(settings: Settings) -> WorkerConfig | None:
    partner = settings.draft_model or (BUNDLED if settings.model == BUNDLED else None)
    if settings.speculation is SpeculationMode.OFF or partner is None:
        return None
    return WorkerConfig(
        model=partner,
        revision=settings.draft_revision,
        device=settings.draft_device,
        dtype=settings.draft_dtype,
        threads=settings.draft_threads,
    )
