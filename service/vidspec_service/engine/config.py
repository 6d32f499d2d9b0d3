"""An engine's configuration. `settings` makes it, and it is sent to the workers unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vidspec_models.compression import DyCoke as DyCoke
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import Preservation, SpeculationMode

MAX_PREFILL_ROWS, _MIN_PREFILL_ROWS = 512, 128
ALONE_PREFILL_ROWS = 768  # where bits do not depend on it and nothing else waits: a last chunk of few rows costs 1.5 ms
_ROWS_PER_THREAD = 64  # the block of prompt rows that one CPU thread computes
_BUNDLED_NAME = "vidspec-bundled"
NGRAM = "ngram"  # a draft without a model and without a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker's model, device and share of the CPU. "auto" is resolved inside the worker, which sees the device."""

    model: str  # "bundled", a folder or a hub id
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None  # None: the engine's choice

    @property
    def name(self) -> str:
        """The model's name if the operator sets no other."""
        return _BUNDLED_NAME if self.model == "bundled" else Path(self.model).name

    def spec(self, role: str) -> ModelSpec:
        """The model that a worker of this role loads."""
        return ModelSpec(path=self.model, role=role, revision=self.revision, device=self.device, dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Both workers' models and devices, and the engine's limits."""

    target: WorkerConfig
    draft: WorkerConfig | None = None  # None: the target alone; for `NGRAM` only `model` counts
    speculation: SpeculationMode = SpeculationMode.AUTO  # for requests that leave the choice to the server
    generation_config: str = "auto"  # "auto": the checkpoint's sampling defaults apply; "none": they do not
    served_model_name: tuple[str, ...] | None = None  # None: the target's own name
    max_running_requests: int = 16
    max_context: int | None = None
    # Most tokens in the KV cache, prompts and answers of all requests together; None: what fits (see `kv_budgets`).
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9  # share of a device's memory that all workers on it may fill
    default_max_tokens: int = 256  # for requests that set no limit
    max_cached_feature_bytes: int = 256 * 2**20  # for features of recent videos, in each worker
    prefill_chunk: int | None = None  # prompt rows per forward between two decoding steps; None: `prefill_rows`
    stream_interval_s: float = 0.004  # how long the target may keep tokens back, to wake the API less often
    preservation: Preservation = Preservation.HIPPO  # both workers must know it: the target measures attention for it
    dycoke: DyCoke = field(default_factory=DyCoke)  # for requests that ask for it
    prune_ratio: float = 0.9  # share of the video's tokens that the draft does not see, in [0, 0.99]
    start_timeout_s: float = 300.0
    log_level: str = "info"  # of the workers, which write to the same stderr
    log_format: str = "text"  # "json": one object a line, like the API's log
    silence_s: float = 30.0  # a ready worker without a heartbeat for this long has hung, unless it computes

    @property
    def has_ngram_draft(self) -> bool:
        """Whether the target makes its own proposals."""
        return self.draft is not None and self.draft.model == NGRAM

    @property
    def has_draft_model(self) -> bool:
        """Whether there is a draft worker."""
        return self.draft is not None and not self.has_ngram_draft

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients call the model; the first is the one that they are told."""
        return self.served_model_name or (self.target.name,)


def prefill_rows(config: EngineConfig, device: str, threads: int) -> int:
    """Prompt rows per forward between two decoding steps; other requests' streams stop during this forward.

    On a CPU no more than keep its threads busy, since every row costs the same: 512 rows of a small model stopped the
    streams for 60 ms on two cores, 128 rows for 15 ms, and the first token came as soon.
    """
    if config.prefill_chunk is not None:
        return config.prefill_chunk
    if device != "cpu":
        return MAX_PREFILL_ROWS
    return max(_MIN_PREFILL_ROWS, min(_ROWS_PER_THREAD * threads, MAX_PREFILL_ROWS))
