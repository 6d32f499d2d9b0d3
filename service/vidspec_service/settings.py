"""Settings: flags over VIDSPEC_* environment over a YAML file. Sole reader of the environment.

Every field is a flag (`--max-frames`), a variable (`VIDSPEC_MAX_FRAMES`) and a YAML key (`max_frames`); its
description is the help text and the comment in `deploy/env.example`. Unknown names are errors.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.engine.types import Compression, EngineConfig, SpeculationMode, WorkerConfig
from vidspec_service.errors import ConfigError

ENV_PREFIX = "VIDSPEC_"
CONFIG_VARIABLE = "VIDSPEC_CONFIG"  # the twin of --config; names the file, so it cannot be a key in it
_LINK_HINT = " (looks like a Kubernetes service link: set enableServiceLinks: false, or rename the Service)"


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


MIB = 1024 * 1024
Device = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Folder = Annotated[Path, AfterValidator(Path.expanduser)]
Lowercase = BeforeValidator(_lower)

_DECODING = DecodingLimits()  # the library's own defaults, stated once


class Settings(BaseSettings):
    """Every knob of the service. Building one reads nothing but its arguments; see `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, validate_default=False
    )

    # Address
    host: NonEmpty = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: Port = Field(8000, description="Port to listen on; 0 picks a free one.")

    # Models
    model: NonEmpty = Field("bundled", description="Target model: 'bundled', a folder or a hub id.")
    draft_model: NonEmpty = Field("bundled", description="Draft model: 'bundled', a folder or a hub id.")
    served_model_name: NonEmpty | None = Field(None, description="Name told to clients; unset: the model's.")
    revision: NonEmpty | None = Field(None, description="Hub revision of the target model.")
    draft_revision: NonEmpty | None = Field(None, description="Hub revision of the draft model.")
    target_device: Device = Field("auto", description="Device of the target: auto, cpu, cuda or cuda:N.")
    draft_device: Device = Field("auto", description="Device of the draft: auto, cpu, cuda or cuda:N.")
    target_dtype: Dtype = Field("auto", description="Of the target: auto, bfloat16, float16 or float32.")
    draft_dtype: Dtype = Field("auto", description="Of the draft: auto, bfloat16, float16 or float32.")
    target_threads: Count | None = Field(None, description="CPU threads of the target worker; unset: chosen.")
    draft_threads: Count | None = Field(None, description="CPU threads of the draft worker; unset: chosen.")

    # Generation
    speculation: SpeculationMode = Field(
        SpeculationMode.AUTO, description="How draft and target work: auto, parallel, serial or off."
    )
    compression: Compression = Field(
        Compression.NONE, description="Lossy compression of requests that name none: none or dycoke."
    )
    allow_compression: bool = Field(False, description="Let a request choose a lossy compression for itself.")
    default_max_tokens: Count = Field(256, description="Answer tokens of requests without max_tokens.")
    max_context: Count | None = Field(None, description="Tokens of prompt plus answer; unset: the model's.")
    prefill_chunk: Count = Field(512, description="Prompt tokens prefilled in one step.")

    # Admission and time
    max_running_requests: Count = Field(16, description="Requests generated at the same time.")
    max_queued_requests: Annotated[int, Field(ge=0)] = Field(
        64, description="Requests beyond those that may upload, decode or wait; more get 503."
    )
    request_timeout_s: Seconds = Field(120, description="Decode, queue, prefill and answer of a request.")
    upload_timeout_s: Seconds = Field(120, description="Longest time a request body may take to arrive.")
    start_timeout_s: Seconds = Field(300, description="Longest time workers may take to load.")
    drain_timeout_s: Seconds = Field(30, description="After SIGTERM, time for running requests to end.")
    keep_alive_s: Seconds = Field(15, description="An idle stream gets a comment line this often.")

    # Uploads and decoding
    max_upload_bytes: Count = Field(_DECODING.max_bytes, description="Largest video file.")
    max_json_bytes: Count = Field(32 * MIB, description="Largest JSON body; held in memory.")
    upload_dir: Folder | None = Field(None, description="For uploads in use; unset: a private one.")
    max_duration_s: Seconds = Field(_DECODING.max_duration_s, description="Longest video.")
    max_pixels: Count = Field(_DECODING.max_pixels, description="Largest frame of a video, width x height.")
    max_source_frames: Count = Field(_DECODING.max_source_frames, description="Most frames of a source.")
    max_frames: Count = Field(_DECODING.max_frames, description="Most frames given to the model.")
    max_decoded_bytes: Count = Field(_DECODING.max_decoded_bytes, description="Most bytes of the RGB frames.")
    decode_timeout_s: Seconds = Field(_DECODING.timeout_s, description="Longest decode of one video.")
    decode_workers: Count = Field(2, description="Videos decoded at the same time.")
    default_num_frames: Count | None = Field(
        None, description="Frames of requests without fps and num_frames; unset: the model's."
    )

    # Operation
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Lowercase] = Field(
        "info", description="Least level that is logged: debug, info, warning or error."
    )
    log_format: Literal["json", "text"] = Field("text", description="One JSON object or one text line each.")
    access_log: bool = Field(True, description="Log one line per HTTP request.")
    metrics: bool = Field(True, description="Serve Prometheus metrics at /metrics.")

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Settings:
        if self.default_num_frames is not None and self.default_num_frames > self.max_frames:
            raise ValueError(f"default_num_frames {self.default_num_frames} > max_frames {self.max_frames}")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only: a `Settings()` in a test never depends on the shell that started it."""
        return (init_settings,)


def load_settings(flags: Mapping[str, object], config: Path | None = None) -> Settings:
    """Merge the three sources, or raise ConfigError with one readable line. A flag of None was not given."""
    _refuse_unknown_variables()
    given = {name: value for name, value in flags.items() if value is not None}
    _refuse_unknown(given, "flag")
    try:
        variables = EnvSettingsSource(Settings)()
    except SettingsError as error:
        raise ConfigError(f"the environment cannot be read: {error}") from error
    if config is None and (named := os.environ.get(CONFIG_VARIABLE)):  # noqa: TID251  the owner of the environment
        config = Path(named)
    file_values = _read_config(config) if config is not None else {}
    try:
        return Settings(**{**file_values, **variables, **given})
    except ValidationError as error:
        raise ConfigError(_first_problem(error, given, variables, config)) from None


def decoding_limits(settings: Settings) -> DecodingLimits:
    """What one video may cost, for the decode pool and the upload reader."""
    return DecodingLimits(
        max_bytes=settings.max_upload_bytes,
        max_duration_s=settings.max_duration_s,
        max_pixels=settings.max_pixels,
        max_source_frames=settings.max_source_frames,
        max_frames=settings.max_frames,
        max_decoded_bytes=settings.max_decoded_bytes,
        timeout_s=settings.decode_timeout_s,
    )


def engine_config(settings: Settings) -> EngineConfig:
    """What the engine is built from."""
    return EngineConfig(
        target=WorkerConfig(
            model=settings.model,
            revision=settings.revision,
            device=settings.target_device,
            dtype=settings.target_dtype,
            threads=settings.target_threads,
        ),
        draft=_draft_config(settings),
        speculation=settings.speculation,
        served_name=settings.served_model_name,
        max_running=settings.max_running_requests,
        max_context=settings.max_context,
        default_max_tokens=settings.default_max_tokens,
        prefill_chunk=settings.prefill_chunk,
        start_timeout_s=settings.start_timeout_s,
    )


def _draft_config(settings: Settings) -> WorkerConfig | None:
    if settings.speculation is SpeculationMode.OFF:
        return None
    return WorkerConfig(
        model=settings.draft_model,
        revision=settings.draft_revision,
        device=settings.draft_device,
        dtype=settings.draft_dtype,
        threads=settings.draft_threads,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the config file {path}: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {path} must hold `name: value` lines")
    _refuse_unknown(content, f"key in {path}:")
    return {name: value for name, value in content.items() if value is not None}


def _refuse_unknown(names: Iterable[object], what: str) -> None:
    for name in names:
        if name not in Settings.model_fields:
            raise ConfigError(f"unknown {what} {name}{_did_you_mean(str(name).lower().replace('-', '_'))}")


def _refuse_unknown_variables() -> None:
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | {CONFIG_VARIABLE}
    for name in sorted(os.environ):  # noqa: TID251  the owner of the environment
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            hint = _did_you_mean(name[len(ENV_PREFIX) :].lower(), as_variable=True)
            is_link = "_SERVICE_" in name or "_PORT_" in name
            hint = hint or (_LINK_HINT if is_link else "")
            raise ConfigError(f"unknown environment variable {name}{hint}")


def _did_you_mean(name: str, *, as_variable: bool = False) -> str:
    close = difflib.get_close_matches(name, Settings.model_fields, n=1)
    if not close:
        return ""
    return f"; did you mean {ENV_PREFIX + close[0].upper() if as_variable else close[0]}?"


def _first_problem(
    error: ValidationError, flags: Mapping[str, object], variables: Mapping[str, object], config: Path | None
) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    if name in flags:
        where = f"--{name.replace('_', '-')}"
    elif name in variables:
        where = ENV_PREFIX + name.upper()
    else:
        where = f"{name} in {config}"
    link = _LINK_HINT if str(problem["input"]).startswith("tcp://") else ""
    return f"{where}: {message}, not {problem['input']!r}{link}"
