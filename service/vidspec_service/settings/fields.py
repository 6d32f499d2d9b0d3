"""Every setting: its type, its bounds, its default and, for the help text and `deploy/env.example`, its description."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, StringConstraints, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from vidspec_models.request import Compression, SpeculationMode
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.engine.config import DyCoke, Preservation

ENV_PREFIX = "VIDSPEC_"


def _split(value: object) -> object:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):  # a flag's words, a YAML list
        value = " ".join(value)
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


def _path_prefix(value: str) -> str:
    if not re.fullmatch(r"(/[\w.~-]+)+/?", value, re.ASCII):
        raise ValueError("expected a path such as /video")
    return value.rstrip("/")


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _off(value: object) -> object:
    """YAML reads the word `off` as false."""
    return SpeculationMode.OFF if value is False else value


def _device_list(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    if len(names) > 1 and {name.partition(":")[0] for name in names} == {"cpu", "cuda"}:
        raise ValueError("expected only CUDA devices or only the CPU")
    if not all(re.fullmatch(r"cpu|cuda:\d+" if len(names) > 1 else r"auto|cpu|cuda(:\d+)?", name) for name in names):
        raise ValueError("expected auto, cpu, cuda, cuda:N or a list such as cuda:0,cuda:1")
    return ",".join(names)


def _only_hosts(values: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for value in values or ():
        # Hosts in URLs are ASCII when they are compared: a name in other letters would match none of them.
        if not re.fullmatch(r"[\w.-]+(:\d{1,5})?|\[[0-9a-fA-F:.]+\](:\d{1,5})?", value, re.ASCII):
            known = "videos.example, videos.example:8443 or xn--bcher-kva.example"
            raise ValueError(f"expected hosts such as {known}, without scheme and path: {value}")
    return values


Device = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Devices = Annotated[str, AfterValidator(_device_list)]  # several: the model's layers are laid over them in this order
Dtype = Literal["auto", "bfloat16", "float16", "float32", "int8"]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Ratio = Annotated[float, Field(ge=0, le=0.99)]
Kept = Annotated[float, Field(ge=0.01, le=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Location = Annotated[Path, AfterValidator(Path.expanduser)]
Lowercase = BeforeValidator(_lower)
Names = Annotated[tuple[NonEmpty, ...] | None, NoDecode, BeforeValidator(_split)]

Hosts = Annotated[Names, AfterValidator(_only_hosts)]

_DECODING, _DYCOKE = DecodingLimits(), DyCoke()  # their own defaults, stated once


class Settings(BaseSettings):
    """Every setting of the service. The constructor reads nothing but its arguments; see `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, validate_default=False
    )

    # Address
    host: NonEmpty = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: Port = Field(default=8000, description="Port to listen on; 0 picks a free one.")
    root_path: Annotated[str, AfterValidator(_path_prefix)] | None = Field(
        default=None, description="Path under which a proxy serves it, as /video; the proxy may strip it or not."
    )

    # Models
    model: NonEmpty = Field(default="bundled", description="Target model: 'bundled', a folder or a hub id.")
    draft_model: NonEmpty | None = Field(
        default=None,
        description="Draft model: 'bundled', a folder or a hub id; unset: the bundled target's; 'ngram': no model, "
        "what followed the same words before; 'self': the target in int8, on a CPU.",
    )
    served_model_name: Names = Field(
        default=None, description="Names that clients may use, the first is told in answers; unset: the model's own."
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="Of requests that do not say: auto, the sampling of the target's generation_config.json; or none.",
    )
    revision: NonEmpty | None = Field(default=None, description="Hub revision of the target model.")
    draft_revision: NonEmpty | None = Field(default=None, description="Hub revision of the draft model.")
    target_device: Devices = Field(
        default="auto", description="Device of the target: auto, cpu, cuda or cuda:N, or several as cuda:0,cuda:1."
    )
    draft_device: Device = Field(default="auto", description="Device of the draft: auto, cpu, cuda or cuda:N.")
    target_dtype: Dtype = Field(
        default="auto", description="Of the target: auto, bfloat16, float16, float32 or, on a CPU, int8 weights."
    )
    draft_dtype: Dtype = Field(
        default="auto", description="Of the draft: auto, bfloat16, float16, float32 or, on a CPU, int8 weights."
    )
    target_threads: Count | None = Field(default=None, description="CPU threads of the target worker; unset: chosen.")
    draft_threads: Count | None = Field(default=None, description="CPU threads of the draft worker; unset: chosen.")

    # Generation
    speculation: Annotated[SpeculationMode, BeforeValidator(_off)] = Field(
        default=SpeculationMode.AUTO, description="How draft and target work: auto, parallel, serial or off."
    )
    preservation: Preservation = Field(
        default=Preservation.HIPPO,
        description=f"Which video tokens the draft sees: {', '.join(Preservation)}; speed only.",
    )
    prune_ratio: Ratio = Field(
        default=0.9, description="Share of the video's tokens that the draft does not see, 0 to 0.99; speed only."
    )
    compression: Compression = Field(
        default=Compression.NONE,
        description=f"Of requests that do not say: {', '.join(Compression)}; all but none may change the text.",
    )
    compression_ratio: Kept | None = Field(
        default=None, description="Share of a video's tokens that compression keeps; unset: 0.25, and K of dycoke."
    )
    dycoke_merge_ratio: Ratio = Field(
        default=_DYCOKE.merge_ratio, description="K: share of a frame's tokens that an earlier frame stands for."
    )
    dycoke_layer: Count = Field(
        default=_DYCOKE.layer, description="L: first layer, from 0, that attends to fewer video tokens in decoding."
    )
    dycoke_hide_ratio: Ratio = Field(
        default=_DYCOKE.hide_ratio, description="P: share of the video tokens left that it leaves out; 0: merging only."
    )
    default_max_tokens: Count = Field(default=256, description="Answer tokens of requests without max_tokens.")
    max_context: Count | None = Field(default=None, description="Tokens of prompt plus answer; unset: the model's.")
    kv_cache_tokens: Count | None = Field(
        default=None,
        description="Most tokens in a worker's KV cache, of all requests; unset: 65536 on a CPU, what fits on CUDA.",
    )
    gpu_memory_utilization: Share = Field(
        default=0.9, description="Share of a GPU's memory for weights, activations and KV cache of all workers on it."
    )
    prefill_chunk: Count | None = Field(
        default=None,
        description="Prompt tokens prefilled between two decoding steps; unset: 512, on a CPU 64 a core, 128 at least, "
        "and half of that with compiled kernels.",
    )

    # Admission and time
    max_running_requests: Count = Field(default=16, description="Requests generated at the same time.")
    max_queued_requests: Annotated[int, Field(ge=0)] = Field(
        default=64, description="Requests beyond those that may upload, decode or wait; more are refused."
    )
    max_queued_bytes: Count = Field(
        default=1024 * 1024 * 1024, description="Bytes that bodies of all requests may hold until they are decoded."
    )
    max_requests_per_key: Count | None = Field(
        default=None, description="Requests that one API key may have under way; more get 429; unset: any number."
    )
    requests_per_minute_per_key: Count | None = Field(
        default=None, description="Requests that one API key may send in a minute; more get 429; unset: any number."
    )
    request_timeout_s: Seconds = Field(default=120, description="Queue, decode, prefill and answer of a request.")
    upload_timeout_s: Seconds = Field(default=120, description="Longest time a request body may take to arrive.")
    start_timeout_s: Seconds = Field(default=300, description="Longest time workers may take to load.")
    silence_s: Seconds = Field(
        default=30,
        description="A worker silent for so long is replaced; one that computes, after 20 times that.",
    )
    drain_timeout_s: Seconds = Field(default=30, description="After SIGTERM, time for running requests to end.")
    keep_alive_s: Seconds = Field(default=15, description="An idle stream gets a comment line this often.")

    # Uploads and decoding
    max_videos_per_request: Count = Field(default=8, description="Videos and images of one request.")
    max_upload_bytes: Count = Field(
        default=_DECODING.max_bytes, description="Largest video file; all files of a request together."
    )
    max_json_bytes: Count = Field(default=32 * 1024 * 1024, description="Largest JSON body; held in memory.")
    upload_dir: Location | None = Field(default=None, description="For uploads in use; unset: a private one.")
    max_stored_bytes: Annotated[int, Field(ge=0)] = Field(
        default=2 * 1024 * 1024 * 1024, description="Bytes of the videos kept by /v1/videos; the least used go first."
    )
    video_ttl_s: Seconds = Field(default=3600, description="Time that a kept video stays after its last use.")
    video_store: NonEmpty | None = Field(
        default=None,
        description="Where several servers keep videos together, file:///folder or s3://bucket/folder; "
        "needs the extra `store`; unset: each its own, until it ends.",
    )
    max_cached_frame_bytes: Annotated[int, Field(ge=0)] = Field(
        default=256 * 1024 * 1024, description="Memory for decoded frames that may be asked about again."
    )
    max_cached_feature_bytes: Annotated[int, Field(ge=0)] = Field(
        default=256 * 1024 * 1024, description="Memory of each worker for the features of such videos."
    )
    video_url_hosts: Hosts = Field(
        default=None, description="Hosts, or host:port, that video_url may be fetched from, by https; unset: none."
    )
    video_url_timeout_s: Seconds = Field(default=30, description="Longest time that fetching a video_url may take.")
    max_duration_s: Seconds = Field(default=_DECODING.max_duration_s, description="Longest video.")
    max_pixels: Count = Field(default=_DECODING.max_pixels, description="Largest frame of a video, width x height.")
    max_frame_pixels: Count = Field(
        default=_DECODING.max_frame_pixels, description="Larger frames are scaled down to so many pixels."
    )
    max_source_frames: Count = Field(default=_DECODING.max_source_frames, description="Most frames of a source.")
    max_frames: Count = Field(default=_DECODING.max_frames, description="Most frames of a request.")
    max_decoded_bytes: Count = Field(default=_DECODING.max_decoded_bytes, description="Most bytes of the RGB frames.")
    decode_timeout_s: Seconds = Field(default=_DECODING.timeout_s, description="Longest decode of one video.")
    decode_workers: Count = Field(
        default=2, description="Videos decoded at the same time; a long one takes what places are free."
    )
    default_num_frames: Count | None = Field(
        default=None, description="Frames of requests without fps and num_frames; unset: the model's."
    )

    # Access
    api_keys: SecretStr | None = Field(
        default=None, description="Keys of which callers must send one, separated by commas; has no flag."
    )
    api_key_file: Location | None = Field(default=None, description="File of such keys, one in a line; unset: no keys.")
    cors_origins: Names = Field(
        default=None, description="Web origins whose pages may ask, separated by commas, or *; unset: none."
    )
    otlp_traces_endpoint: NonEmpty | None = Field(
        default=None,
        description="OpenTelemetry collector for a trace of each request, as in http://collector:4318/v1/traces; "
        "needs the extra `otel`; unset: no traces.",
    )
    metrics_open: bool = Field(default=False, description="Serve /metrics without a key where keys are asked for.")

    # Operation
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Lowercase] = Field(
        default="info", description="Least level that is logged: debug, info, warning or error."
    )
    log_format: Literal["json", "text"] = Field(default="text", description="One JSON object or one text line each.")
    access_log: bool = Field(default=True, description="Log one line per HTTP request.")
    metrics: bool = Field(default=True, description="Serve Prometheus metrics at /metrics.")

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


SECRETS = frozenset(name for name, field in Settings.model_fields.items() if field.annotation == SecretStr | None)
"""Settings without a flag, since a command line is not secret; no message repeats their values."""
