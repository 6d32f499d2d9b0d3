"""What an engine is built from; `settings` makes it, and workers are sent it as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vidspec_models.compression import DyCoke as DyCoke
from vidspec_models.request import Preservation as Preservation
from vidspec_models.request import SpeculationMode

CPU_KV_CACHE_TOKENS = 65536  # of a worker whose device does not say how much it has left
MOST_PREFILL_ROWS, _LEAST_PREFILL_ROWS = 512, 128
_ROWS_PER_THREAD = 64  # of which a thread of a CPU makes a block
_BUNDLED_NAME = "vidspec-bundled"
NGRAM = "ngram"  # a draft that is no model and has no worker


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
        """What the model is called where the operator names nothing else."""
        return _BUNDLED_NAME if self.model == "bundled" else Path(self.model).name


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Both workers' models and devices, and the limits of the whole."""

    target: WorkerConfig
    draft: WorkerConfig | None = None  # None: the target alone; of `NGRAM` only the model's name counts
    speculation: SpeculationMode = SpeculationMode.AUTO  # for requests that leave the choice to the server
    generation_config: str = "auto"  # how the checkpoint wants to be sampled counts; "none": it does not
    served_model_name: tuple[str, ...] | None = None  # None: the target's own name
    max_running_requests: int = 16
    max_context: int | None = None
    # Keys and values of so many tokens at most, prompts and answers of all requests together; None: what fits on CUDA.
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9  # share of a CUDA device's memory that all workers on it may fill
    default_max_tokens: int = 256  # of requests that name no limit
    max_cached_feature_bytes: int = 256 * 2**20  # features of videos seen lately, in each worker
    prefill_chunk: int | None = None  # prompt rows per forward between two decoding steps; None: `prefill_rows`
    stream_interval_s: float = 0.004  # how long the target may keep tokens back, to wake the API less often
    preservation: Preservation = Preservation.HIPPO  # both workers must know: the target measures for it
    dycoke: DyCoke = field(default_factory=DyCoke)  # of requests that ask for it
    prune_ratio: float = 0.9  # share of the video's tokens that the draft does not see, in [0, 0.99]
    start_timeout_s: float = 300.0
    log_level: str = "info"  # of the workers, which write to the same stderr
    log_format: str = "text"  # "json": one object a line, as the API's
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
    """Prompt rows per forward between two decoding steps, in which other requests' streams stand still.

    On a CPU no more than keep its threads at work, since every row costs the same: 512 rows of a small model held the
    streams up for 60 ms on two cores, 128 for 15, and the first token came as soon.
    """
    if config.prefill_chunk is not None:
        return config.prefill_chunk
    if device != "cpu":
        return MOST_PREFILL_ROWS
    return max(_LEAST_PREFILL_ROWS, min(_ROWS_PER_THREAD * threads, MOST_PREFILL_ROWS))
