"""Every metric, declared once on an injected registry; names and meanings are vLLM's, prefix `vidspec:`.

The api records what a client sees, the engine what its workers do; no number has two writers. Only declarations are
here: an attribute has the name of its metric, and the code that knows a number records it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(float(bound) for bound in text.split())


_FIRST_TOKEN_S = _bounds(
    ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"  # vLLM's
)
# vLLM's, and finer below 10 ms: several accepted tokens arrive in one burst.
_TOKEN_GAP_S = _bounds(".001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
# vLLM's, and finer below 0.3 s: small models answer within it.
_PHASE_S = _bounds(".003 .01 .03 .1 .3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_ROLES = ("draft", "target")
_REFUSALS = ("queue_full", "draining", "rate_limited")
_ENDS = ("stop", "length", "abort", "error")  # abort: the client has left
_FORWARD_S = _bounds(".0005 .001 .002 .003 .005 .0075 .01 .015 .02 .03 .05 .1 .2 .5 1 5 10 30 60")
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_FRAMES = _bounds("1 2 4 8 16 24 32 48 64 96 128 192 256 384 512 768 1024 2048 4096")
_BYTES = tuple(float(2**power) for power in range(14, 31, 2))


class _Labelled:
    """A registry that adds labels to metrics with our prefix, so that the code that records a number need not."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """As the registry's own, for `generate_latest`."""
        for metric in self._registry.collect():
            if metric.name.startswith("vidspec:"):
                metric.samples = [each._replace(labels={**self._labels, **each.labels}) for each in metric.samples]
            yield metric


class EngineMetrics:
    """What an engine's workers do."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # `_created` series double the page and no dashboard reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self.kv_cache_usage_perc = self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache that requests use, 0 to 1", "role"
        )
        self.worker_idle_ratio = self._gauge("worker_idle_ratio", "Share of the time without work, 0 to 1", "role")
        self.worker_restarts = self._counter(
            "worker_restarts", "Workers restarted after they ended or stopped responding", "role", known=_ROLES
        )
        self.forward = {
            role: self._histogram(f"{role}_forward_seconds", f"Time of one {role} forward pass", _FORWARD_S)
            for role in _ROLES
        }
        self.spec_decode_num_drafts = self._counter(
            "spec_decode_num_drafts", "Verification steps with at least one draft token"
        )
        # Counted as in the answers: `SpeculationStats` defines judged and accepted.
        self.spec_decode_num_draft_tokens = self._counter(
            "spec_decode_num_draft_tokens",
            "Draft tokens that the target verified: the accepted ones and the first rejected one",
        )
        self.spec_decode_num_accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.spec_decode_num_accepted_tokens_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the proposal", "position"
        )
        self.spec_decode_rollbacks = self._counter(
            "spec_decode_rollbacks", "Draft token chains discarded after a mismatch"
        )
        self.spec_decode_wasted_draft_tokens = self._counter(
            "spec_decode_wasted_draft_tokens", "Draft tokens that the target never verified"
        )

    def _counter(self, name: str, text: str, *labels: str, known: Iterable[str] = ()) -> Counter:
        """Starts the `known` values of the label at 0: Prometheus sees no increase in a series that begins at 1."""
        counter = Counter(f"vidspec:{name}", text, labels, registry=self._registry)
        for value in known:
            counter.labels(value)
        return counter

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"vidspec:{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"vidspec:{name}", text, buckets=bounds, registry=self._registry)


class Metrics(EngineMetrics):
    """Every metric of the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.build = Info("vidspec:build", "Versions, models and devices", registry=registry)
        self.num_requests_running = self._gauge("num_requests_running", "Requests whose answer is being generated")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests admitted and not generated yet")
        self.worker_ready = self._gauge("worker_ready", "1 while the worker is ready for work, else 0", "role")
        self.worker_fallback = self._gauge(
            "worker_fallback", "1 if the worker's steps use a fallback that is several times slower, else 0", "role"
        )
        self._declare_requests()
        self._declare_video()

    def exposition(self, model_name: str) -> bytes:
        """The page at /metrics, always as text: OpenMetrics would turn the colons into underscores.

        Every metric of ours has the label `model_name`, as vLLM's have: dashboards filter by it.
        """
        return generate_latest(_Labelled(self._registry, {"model_name": model_name}))

    def _declare_requests(self) -> None:
        self.http_requests = self._counter("http_requests", "HTTP responses", "method", "route", "status")
        self.admission_rejections = self._counter(
            "admission_rejections", "Requests refused at admission", "reason", known=_REFUSALS
        )
        # Counted once for each request that the engine accepted.
        self.request_success = self._counter(
            "request_success", "Requests ended, by reason", "finished_reason", known=_ENDS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, including video tokens")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from the received body to the first token", _FIRST_TOKEN_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two outputs of a request", _TOKEN_GAP_S
        )
        self.request_time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", _TOKEN_GAP_S
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "Time from the received body to the last token", _PHASE_S
        )
        self.request_queue_time = self._histogram(
            "request_queue_time_seconds", "Time from submission to the start of the prefill", _PHASE_S
        )
        self.request_prefill_time = self._histogram(
            "request_prefill_time_seconds", "Time from the start of the prefill to the first token", _PHASE_S
        )
        self.request_decode_time = self._histogram(
            "request_decode_time_seconds", "Time from the first to the last token", _PHASE_S
        )
        self.request_inference_time = self._histogram(
            "request_inference_time_seconds", "Time from the start of the prefill to the last token", _PHASE_S
        )
        self.prefix_cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache and not computed again"
        )
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.request_generation_tokens = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)

    def _declare_video(self) -> None:
        self.video_decode = self._histogram(
            "video_decode_seconds", "Time to decode the chosen frames of a video", _PHASE_S
        )
        self.video_upload_bytes = self._histogram("video_upload_bytes", "Size of a video file", _BYTES)
        self.video_frames_sampled = self._histogram("video_frames_sampled", "Frames given to the model", _FRAMES)
        self.video_tokens = self._histogram("video_tokens", "Visual tokens of a prompt", _TOKENS)
        self.mm_cache_queries = self._counter("mm_cache_queries", "Lookups of a video's frames in memory")
        self.mm_cache_hits = self._counter("mm_cache_hits", "Lookups that found the frames in memory")
        self.stored_videos = self._gauge("stored_videos", "Videos stored for further questions")
        self.stored_video_bytes = self._gauge("stored_video_bytes", "Bytes that the stored videos count for")
