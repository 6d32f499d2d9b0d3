"""Every setting: its type, its bounds, its default and, for the help text and `deploy/env.example`, its description."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, StringConstraints, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from vidspec_models.request import Compression, Preservation, SpeculationMode
from vidspec_service.arguments import DEFAULT_PORT
from vidspec_service.decoding.clip import DecodingLimits
from vidspec_service.engine.config import DyCoke

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
    """The word `off` is false in the YAML of Ray Serve's `args`."""
    return SpeculationMode.OFF if value is False else _lower(value)


def _device_list(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    if {name.partition(":")[0] for name in names} == {"cpu", "cuda"}:
        raise ValueError("all layers must be on CUDA devices, or all on the CPU")
    if not all(re.fullmatch(r"cpu|cuda:\d+" if len(names) > 1 else r"auto|cpu|cuda(:\d+)?", name) for name in names):
        raise ValueError("expected auto, cpu, cuda, cuda:N or a list such as cuda:0,cuda:1")
    return ",".join(names)


def _a_path(value: object) -> object:
    if value == "" or "\0" in str(value):  # the first is pathlib's working folder, the other would be a traceback
        raise ValueError("expected a path")
    return value


def _expanded(value: Path) -> Path:
    try:
        return value.expanduser()
    except RuntimeError as error:  # an unknown user, or one without a home
        raise ValueError("expected a path whose ~ stands for a folder") from error


def _only_hosts(values: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for value in values or ():
        # Hosts in URLs are ASCII when they are compared: a name in other letters would match none of them.
        if not re.fullmatch(r"[\w.-]+(:\d{1,5})?|\[[0-9a-fA-F:.]+\](:\d{1,5})?", value, re.ASCII):
            known = "videos.example, videos.example:8443 or xn--bcher-kva.example"
            raise ValueError(f"expected hosts such as {known}, not a URL: {value}")
    return values


def _only_origins(values: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for value in values or ():
        # Compared letter by letter with what browsers send: no path, not even a slash, a host in lower case, and a port
        # only if the scheme does not imply it.
        if not re.fullmatch(r"\*|null|(?!https:.*:443$|http:.*:80$)[a-z][a-z0-9+.-]*://[^/A-Z*]+", value):
            raise ValueError(f"expected origins such as https://app.example, or *, not {value}")
    return values


def _http_address(value: str) -> str:
    if not re.match(r"https?://[^/]", value):
        raise ValueError("expected an address such as http://collector:4318/v1/traces")
    _ = urlsplit(value).port  # raises ValueError for one that there is not: spans would be lost, and nothing else
    return value


Device = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Devices = Annotated[str, AfterValidator(_device_list)]  # several: the model's layers are laid over them in this order
Dtype = Literal["auto", "bfloat16", "float16", "float32", "int8", "int4"]
Port = Annotated[int, Field(ge=0, le=65535)]
# More than any machine has, and little enough for messages to workers and for kernel limits that are multiples of it.
_MOST = 10**15
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=_MOST)]
# Threads or processes, which are started at once: a typo must not fill the machine.
Parallel = Annotated[int, Field(ge=1, le=4096)]
Share = Annotated[float, Field(gt=0, le=1)]
Ratio = Annotated[float, Field(ge=0, le=0.99)]
KeepRatio = Annotated[float, Field(ge=0.01, le=1)]
# Less would keep the event loop busy (`keep_alive_s`); more, thirty years, is too much for dates and kernel limits.
Seconds = Annotated[float, Field(ge=0.01, le=1e9)]
# Workers report once a second: less would end healthy ones, again and again.
Silence = Annotated[float, Field(ge=2, le=1e9)]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
# Nor a line end of Windows, which a file of variables may have: a terminal would not show what is wrong.
Host = Annotated[str, StringConstraints(pattern=r"^\S+$")]
Location = Annotated[Path, BeforeValidator(_a_path), AfterValidator(_expanded)]
Lowercase = BeforeValidator(_lower)
Names = Annotated[tuple[NonEmpty, ...] | None, NoDecode, BeforeValidator(_split)]

Hosts = Annotated[Names, AfterValidator(_only_hosts)]
Origins = Annotated[Names, AfterValidator(_only_origins)]

_DECODING, _DYCOKE = DecodingLimits(), DyCoke()  # their own defaults, stated once


class Settings(BaseSettings):
    """Every setting of the service. The constructor reads nothing but its arguments; see `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        validate_default=False,
        use_attribute_docstrings=True,  # the string below a field is its description
    )

    # Address
    host: Host = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: Port = DEFAULT_PORT
    """Port to listen on; 0 picks a free one, but not on a cluster."""
    root_path: Annotated[str, AfterValidator(_path_prefix)] | None = None
    """Path under which a proxy serves vidspec, such as /video; the proxy may strip it or not."""

    # Models
    model: NonEmpty = "bundled"
    """Target model: 'bundled', a folder or a hub id."""
    draft_model: NonEmpty | None = Field(
        default=None,
        description="Draft model: 'bundled', a folder or a hub id; 'ngram': no model, proposes what followed the "
        "same words before; 'self': the target in int4, on a CPU; unset: bundled for the bundled target, else none.",
    )
    served_model_name: Names = None
    """Names that clients may use for the model; answers have the first one; unset: the model's own."""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling defaults of requests: auto takes the target's generation_config.json, none ignores it."""
    revision: NonEmpty | None = None
    """Hub revision of the target model."""
    draft_revision: NonEmpty | None = None
    """Hub revision of the draft model."""
    target_device: Devices = "auto"
    """Device of the target: auto, cpu, cuda or cuda:N, or several as cuda:0,cuda:1."""
    draft_device: Device = "auto"
    """Device of the draft: auto, cpu, cuda or cuda:N."""
    target_dtype: Dtype = "auto"
    """Data type of the target: auto, bfloat16, float16, float32, int8 or, on a CPU, int4."""
    draft_dtype: Dtype = "auto"
    """Data type of the draft: auto, bfloat16, float16, float32, int8 or, on a CPU, int4."""
    target_threads: Parallel | None = None
    """CPU threads of the target worker; unset: automatic."""
    draft_threads: Parallel | None = None
    """CPU threads of the draft worker; unset: automatic."""

    # Generation
    speculation: Annotated[SpeculationMode, BeforeValidator(_off)] = SpeculationMode.AUTO
    """How draft and target work: auto, parallel, serial or off."""
    preservation: Preservation = Field(
        default=Preservation.HIPPO,
        description=f"Which video tokens the draft sees: {', '.join(Preservation)}; affects speed only.",
    )
    prune_ratio: Ratio = 0.9
    """Share of the video's tokens that the draft does not see, 0 to 0.99; affects speed only."""
    compression: Compression = Field(
        default=Compression.NONE,
        description=f"Default compression of requests: {', '.join(Compression)}; all but none may change the text.",
    )
    compression_ratio: KeepRatio | None = None
    """Share of a video's tokens that compression keeps; unset: 0.25; for dycoke, what its K gives."""
    dycoke_merge_ratio: Ratio = _DYCOKE.merge_ratio
    """K of DyCoke: share of a compared frame's tokens that an earlier frame replaces."""
    dycoke_layer: Count = _DYCOKE.layer
    """L of DyCoke: first layer, counted from 0, that attends to fewer video tokens while decoding."""
    dycoke_hide_ratio: Ratio = _DYCOKE.hide_ratio
    """P of DyCoke: share of the remaining video tokens that layers from L on ignore; 0: merging only."""
    default_max_tokens: Count = 256
    """Maximum answer tokens of requests without max_tokens."""
    max_context: Count | None = None
    """Maximum tokens of prompt plus answer; unset: the model's own, or kv_cache_tokens if that is less."""
    kv_cache_tokens: Count | None = None
    """Maximum tokens in a worker's KV cache, of all requests; unset: what fits, on a CPU at most 65536."""
    gpu_memory_utilization: Share = 0.9
    """Share of a GPU's memory, on a CPU of the machine's, that may be in use with all KV caches full."""
    prefill_chunk: Count | None = Field(
        default=None,
        description="Prompt tokens prefilled between two decoding steps; unset: 512; on a CPU 64 per core, "
        "at least 128 and at most 512, and half of that with compiled kernels.",
    )

    # Admission and time
    max_running_requests: Count = 16
    """Maximum number of requests generated at the same time."""
    max_queued_requests: CountOrZero = 64
    """Further requests that may upload, decode or wait at the same time; more are refused."""
    max_queued_bytes: Count = 1024 * 1024 * 1024
    """Maximum bytes of all request bodies together, counted until they are decoded."""
    max_requests_per_key: Count | None = Field(
        default=None,
        description="Requests that one API key (without keys: one client address) may have in progress; more get 429; "
        "unset: no limit.",
    )
    requests_per_minute_per_key: Count | None = None
    """Requests per minute of one API key (without keys: of all clients together); more get 429; unset: no limit."""
    request_timeout_s: Seconds = 120
    """Maximum time for queue, decode, prefill and answer of a request."""
    upload_timeout_s: Seconds = 120
    """Maximum time for a request body to arrive."""
    start_timeout_s: Seconds = 300
    """Maximum time for the workers to load."""
    silence_s: Silence = 30
    """A worker that is silent for this long is replaced; one that is computing, after 20 times as long."""
    drain_timeout_s: Seconds = 30
    """Time for running requests to finish after SIGTERM."""
    keep_alive_s: Seconds = 15
    """An idle stream gets a comment line this often."""

    # Uploads and decoding
    max_videos_per_request: Count = 8
    """Maximum number of videos and images in a request."""
    max_upload_bytes: Count = _DECODING.max_bytes
    """Maximum bytes of a video file, and of all files of a request together."""
    max_json_bytes: Count = 32 * 1024 * 1024
    """Maximum bytes of a JSON body; it is held in memory."""
    upload_dir: Location | None = None
    """Folder for uploads in use and kept videos; unset: a private one."""
    max_stored_bytes: CountOrZero = 2 * 1024 * 1024 * 1024
    """Maximum bytes of videos kept by /v1/videos; the least recently used are deleted."""
    video_ttl_s: Seconds = 3600
    """How long a video is kept after its last use."""
    video_store: NonEmpty | None = Field(
        default=None,
        description="Storage for kept videos that several servers share, file:///folder or s3://bucket/folder; "
        "needs the extra `store`; unset: each server keeps its own, until it ends.",
    )
    max_cached_frame_bytes: CountOrZero = 256 * 1024 * 1024
    """Maximum bytes of decoded frames cached for follow-up questions."""
    max_cached_feature_bytes: CountOrZero = 256 * 1024 * 1024
    """Maximum bytes of vision features that each worker caches for follow-up questions."""
    video_url_hosts: Hosts = None
    """Hosts, or host:port, from which video_url may be fetched over https; unset: none."""
    video_url_timeout_s: Seconds = 30
    """Maximum time to fetch a video_url."""
    max_duration_s: Seconds = _DECODING.max_duration_s
    """Maximum duration of a video."""
    max_pixels: Count = _DECODING.max_pixels
    """Maximum pixels of a frame in a video file, width x height."""
    max_frame_pixels: Count = _DECODING.max_frame_pixels
    """Frames with more pixels than this are scaled down to it."""
    max_source_frames: Count = _DECODING.max_source_frames
    """Maximum number of frames in a video file."""
    max_frames: Count = _DECODING.max_frames
    """Maximum number of frames of a request's videos."""
    max_decoded_bytes: Count = _DECODING.max_decoded_bytes
    """Maximum bytes of a request's decoded RGB frames."""
    decode_timeout_s: Seconds = _DECODING.timeout_s
    """Maximum time to decode one video."""
    decode_workers: Parallel = 2
    """Videos decoded at the same time; a long one also uses the places that are free."""
    default_num_frames: Count | None = None
    """Frames of requests without fps and num_frames; unset: the model's default."""

    # Access
    api_keys: SecretStr | None = None
    """API keys, separated by commas; callers must send one. `vidspec serve` has the flag --api-key."""
    api_key_file: Location | None = None
    """File of API keys, one per line; unset: no keys."""
    cors_origins: Origins = None
    """Web origins whose pages may call the API, separated by commas, or *; unset: none."""
    otlp_traces_endpoint: Annotated[str, AfterValidator(_http_address)] | None = Field(
        default=None,
        description="OpenTelemetry collector for a trace of each request, such as http://collector:4318/v1/traces; "
        "needs the extra `otel`; unset: no traces.",
    )
    metrics_open: bool = False
    """Serve /metrics without an API key, even if other routes need one."""

    # Operation
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Lowercase] = "info"
    """Lowest level that is logged: debug, info, warning or error."""
    log_format: Literal["json", "text"] = "text"
    """Format of a log line: json (one object) or text."""
    access_log: bool = True
    """Log one line per HTTP request."""
    metrics: bool = True
    """Serve Prometheus metrics at /metrics."""

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Settings:
        if self.default_num_frames is not None and self.default_num_frames > self.max_frames:
            raise ValueError(f"default_num_frames {self.default_num_frames} > max_frames {self.max_frames}")
        if self.max_context is not None and self.max_context > (self.kv_cache_tokens or self.max_context):
            raise ValueError(f"max_context {self.max_context} > kv_cache_tokens {self.kv_cache_tokens}")
        return self

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only: a `Settings()` in a test never depends on the shell that started it."""
        return (sources["init_settings"],)


SECRETS = frozenset(name for name, field in Settings.model_fields.items() if field.annotation == SecretStr | None)
"""Settings without a flag, since a command line is not secret; no message repeats their values."""
