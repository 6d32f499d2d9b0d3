"""Every metric, declared once on an injected registry; names and meanings are vLLM's, prefix `vidspec:`.

The api records what a client sees, the engine what its workers do; no number has two writers.
"""

from __future__ import annotations

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


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(float(bound) for bound in text.split())


_FIRST_TOKEN_S = _bounds(
    ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"  # vLLM's
)
# vLLM's, and finer below 10 ms: several accepted tokens arrive in one burst.
_TOKEN_GAP_S = _bounds(".001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
# vLLM's, and finer below 0.3 s: small models answer within it.
_PHASE_S = _bounds(".003 .01 .03 .1 .3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_FORWARD_S = _bounds(".0005 .001 .002 .003 .005 .0075 .01 .015 .02 .03 .05 .1 .2 .5 1 5")
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_FRAMES = _bounds("1 2 4 8 16 24 32 48 64 96 128 192 256 384 512 768")
_BYTES = tuple(float(2**power) for power in range(14, 31, 2))


class Metrics:
    """Every metric of the service. Callers use the recording methods, so a name is written in one place."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # `_created` series double the page and no dashboard reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._build = Info("vidspec:build", "Versions, models and devices", registry=registry)
        self._declare_requests()
        self._declare_video()
        self._declare_engine()

    def exposition(self) -> bytes:
        """The page at /metrics, always as text: OpenMetrics would turn the colons into underscores."""
        return generate_latest(self._registry)

    def _declare_requests(self) -> None:
        self._http = self._counter("http_requests", "HTTP answers", "method", "route", "status")
        self._rejections = self._counter("admission_rejections", "Requests refused at the door", "reason")
        self._finished = self._counter("request_success", "Requests ended, by why", "finished_reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, video included")
        self._generation_tokens = self._counter("generation_tokens", "Tokens committed")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Body received to first token", _FIRST_TOKEN_S
        )
        self._token_gap = self._histogram("inter_token_latency_seconds", "Between outputs", _TOKEN_GAP_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean per token after the first", _TOKEN_GAP_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Body received to last token", _PHASE_S)
        self._queue = self._histogram("request_queue_time_seconds", "Submitted to prefill begun", _PHASE_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "Prefill to first token", _PHASE_S)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token", _PHASE_S)
        self._inference = self._histogram("request_inference_time_seconds", "Prefill to last token", _PHASE_S)
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found there, and not computed again")
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._answer_size = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)

    def _declare_video(self) -> None:
        self._video_decode = self._histogram("video_decode_seconds", "Bytes to chosen frames", _PHASE_S)
        self._video_bytes = self._histogram("video_upload_bytes", "Size of a video file", _BYTES)
        self._video_frames = self._histogram("video_frames_sampled", "Frames given to the model", _FRAMES)
        self._video_tokens = self._histogram("video_tokens", "Visual tokens of a prompt", _TOKENS)
        self._clip_queries = self._counter("mm_cache_queries", "Times that frames of a video were needed")
        self._clip_hits = self._counter("mm_cache_hits", "Times that they were still in memory")
        self._num_videos = self._gauge("stored_videos", "Videos kept for more questions")
        self._num_video_bytes = self._gauge("stored_video_bytes", "Bytes that they count for")

    def _declare_engine(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests being generated")
        self._waiting = self._gauge("num_requests_waiting", "Requests admitted and not yet running")
        self._worker_ready = self._gauge("worker_ready", "1 while the worker takes work", "role")
        self._kv_use = self._gauge("kv_cache_usage_perc", "Used part of the KV cache, 0 to 1", "role")
        self._idle = self._gauge("worker_idle_ratio", "Part of the time without work, 0 to 1", "role")
        self._restarts = self._counter("worker_restarts", "Workers started again after a death", "role")
        self._forwards = {
            role: self._histogram(f"{role}_forward_seconds", f"One {role} forward", _FORWARD_S)
            for role in ("draft", "target")
        }
        self._drafts = self._counter("spec_decode_num_drafts", "Verifications of at least one proposal")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Proposed tokens judged")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Proposed tokens accepted")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the proposal", "position"
        )
        self._rollbacks = self._counter("spec_decode_rollbacks", "Draft chains void after a mismatch")
        self._wasted = self._counter("spec_decode_wasted_draft_tokens", "Tokens drafted, never judged")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vidspec:{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"vidspec:{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"vidspec:{name}", text, buckets=bounds, registry=self._registry)

    # Recorded by the api: what a client sees.

    def http_answered(self, method: str, route: str, status: int) -> None:
        """One HTTP answer; `route` is the template, never the path that a client made up."""
        self._http.labels(method, route, str(status)).inc()

    def admission_rejected(self, reason: str) -> None:
        """A request refused before any work; reason is the error's code."""
        self._rejections.labels(reason).inc()

    def video_decoded(self, *, seconds: float, num_bytes: int, num_frames: int) -> None:
        """One video turned into frames."""
        self._video_decode.observe(seconds)
        self._video_bytes.observe(num_bytes)
        self._video_frames.observe(num_frames)

    def clip_looked_up(self, *, is_hit: bool) -> None:
        """Frames were needed, and were in memory or had to be decoded."""
        self._clip_queries.inc()
        self._clip_hits.inc(is_hit)

    def prompt_accepted(self, *, prompt_tokens: int, video_tokens: int, cached_tokens: int) -> None:
        """The engine took the request."""
        self._prefix_queries.inc(prompt_tokens)
        self._prefix_hits.inc(cached_tokens)
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_size.observe(prompt_tokens)
        self._video_tokens.observe(video_tokens)

    def first_token(self, seconds: float) -> None:
        """From the received body to the first committed token."""
        self._first_token.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        """Between two outputs of one request."""
        self._token_gap.observe(seconds)

    def tokens(self, count: int) -> None:
        """Tokens committed and handed to a client."""
        self._generation_tokens.inc(count)

    def request_phases(
        self, *, queue_s: float, prefill_s: float, decode_s: float, per_token_s: float | None, num_tokens: int
    ) -> None:
        """Where the time of one complete answer went; an answer of one token has no time per token."""
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        self._inference.observe(prefill_s + decode_s)
        self._answer_size.observe(num_tokens)
        if per_token_s is not None:
            self._per_token.observe(per_token_s)

    def request_ended(self, reason: str, seconds: float) -> None:
        """Once for every request the engine took: stop, length, abort (client left) or error."""
        self._finished.labels(reason).inc()
        self._e2e.observe(seconds)

    def build(self, facts: dict[str, str]) -> None:
        """Versions, models and devices, once known."""
        self._build.info(facts)

    def load(self, *, num_running: int, num_waiting: int) -> None:
        """Read at each scrape."""
        self._running.set(num_running)
        self._waiting.set(num_waiting)

    def kept_videos(self, *, count: int, num_bytes: int) -> None:
        """Read at each scrape."""
        self._num_videos.set(count)
        self._num_video_bytes.set(num_bytes)

    def worker_ready(self, role: str, is_ready: bool) -> None:
        """Read at each scrape."""
        self._worker_ready.labels(role).set(is_ready)

    # Recorded by the engine: what the workers do.

    def forward(self, role: str, seconds: float) -> None:
        """One forward of "draft" or "target"."""
        self._forwards[role].observe(seconds)

    def verified(self, *, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """One verification that judged at least one draft token; `SpeculationStats` defines judged and accepted."""
        self._drafts.inc()
        self._draft_tokens.inc(num_draft_tokens)
        self._accepted.inc(num_accepted_tokens)
        for position in range(num_accepted_tokens):
            self._accepted_at.labels(str(position)).inc()

    def rolled_back(self, num_rollbacks: int, num_wasted: int) -> None:
        """Of one ended request: draft chains that became void, and drafted tokens that were never judged."""
        self._rollbacks.inc(num_rollbacks)
        self._wasted.inc(num_wasted)

    def kv_use(self, role: str, ratio: float) -> None:
        """Used part of a worker's KV cache."""
        self._kv_use.labels(role).set(ratio)

    def idle(self, role: str, ratio: float) -> None:
        """Part of the last interval in which the worker had nothing to do."""
        self._idle.labels(role).set(ratio)

    def worker_restarted(self, role: str) -> None:
        """A dead worker was started again."""
        self._restarts.labels(role).inc()
