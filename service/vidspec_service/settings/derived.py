"""The plain configurations that engine and decoding are built from, each made from settings in one place."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from vidspec_models.request import SpeculationMode
from vidspec_service.decoding.clip import DecodingLimits
from vidspec_service.engine.config import DyCoke, EngineConfig, WorkerConfig
from vidspec_service.settings.fields import Settings

BUNDLED = "bundled"
SELF = "self"


def decoding_limits(settings: Settings, default_num_frames: int) -> DecodingLimits:
    """What one video may cost, for the decode pool; `default_num_frames` is the model's."""
    return DecodingLimits(
        max_bytes=settings.max_upload_bytes,
        max_duration_s=settings.max_duration_s,
        max_pixels=settings.max_pixels,
        max_frame_pixels=settings.max_frame_pixels,
        max_source_frames=settings.max_source_frames,
        max_frames=settings.max_frames,
        default_num_frames=settings.default_num_frames or default_num_frames,
        max_decoded_bytes=settings.max_decoded_bytes,
        timeout_s=settings.decode_timeout_s,
    )


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's configuration: fields with the name of a setting, and fields made of several settings."""
    same: dict[str, Any] = {name: getattr(settings, name) for name in Settings.model_fields}
    same = {field.name: same[field.name] for field in fields(EngineConfig) if field.name in same}
    dycoke = DyCoke(
        merge_ratio=settings.dycoke_merge_ratio, layer=settings.dycoke_layer, hide_ratio=settings.dycoke_hide_ratio
    )
    target = _worker_config(settings, "target", settings.model, settings.revision)
    return EngineConfig(**{**same, "target": target, "draft": _draft_config(settings), "dycoke": dycoke})


def _draft_config(settings: Settings) -> WorkerConfig | None:
    draft = settings.draft_model or (BUNDLED if settings.model == BUNDLED else None)
    if settings.speculation is SpeculationMode.OFF or draft is None:
        return None
    if draft != SELF:
        return _worker_config(settings, "draft", draft, settings.draft_revision)
    # The target itself in int4: it hardly ever disagrees, and is as much faster as it is smaller.
    weights = "bundled-target" if settings.model == BUNDLED else settings.model
    copy = _worker_config(settings, "draft", weights, settings.revision)
    return replace(copy, dtype="int4") if copy.dtype == "auto" else copy


def _worker_config(settings: Settings, role: str, model: str, revision: str | None) -> WorkerConfig:
    placed = {name: getattr(settings, f"{role}_{name}") for name in ("device", "dtype", "threads")}
    return WorkerConfig(model=model, revision=revision, **placed)
