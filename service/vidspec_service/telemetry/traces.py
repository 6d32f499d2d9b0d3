"""Traces: a span for each request and for each of its eight steps, sent to an OpenTelemetry collector over HTTP.

Only made if an endpoint is set. Everything is recorded in the API process: workers report when they worked, on the
monotonic clock that all processes share, so only the API process needs the library.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from vidspec_service.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_TIMEOUT_S = 3.0  # for one batch of spans with all retries, and at the end of the service for those that wait
_FAILED = 500  # the first HTTP status of the server's own faults
StatusOf = Callable[[BaseException], int]


@dataclass(slots=True)
class Step:
    """One step of a request, from its first to its last moment; some steps have many short pieces of work."""

    began: float  # on the monotonic clock
    ended: float
    busy_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def extend(self, began: float, ended: float, **counts: int) -> None:
        """Add a piece of work; counts are added up."""
        self.began, self.ended = min(self.began, began), max(self.ended, ended)
        self.busy_s += ended - began
        self.counts.update(counts)


class RequestTrace:
    """One request's spans, named as in docs/architecture.md; a context manager that sends them when it exits."""

    def __init__(self, tracer: Tracer, span: Span, status_of: StatusOf) -> None:
        self._tracer = tracer
        self._span = span
        self._status_of = status_of
        self.began = time.monotonic()  # when the request came
        self._clock_ns = time.time_ns() - time.monotonic_ns()
        self._steps: dict[tuple[str, str], Step] = {}

    def set_attributes(self, facts: Mapping[str, str | int | float | bool | None]) -> None:
        """Add facts of the whole request; None means unknown."""
        self._span.set_attributes({name: value for name, value in facts.items() if value is not None})

    def ended_by(self, error: BaseException) -> None:
        """The request was not answered. As OpenTelemetry has it, what its client got wrong (4xx) is no error here."""
        from opentelemetry.trace import StatusCode

        if self._status_of(error) >= _FAILED:
            self._span.set_status(StatusCode.ERROR, str(error) or type(error).__name__)

    def add_step(self, name: str, began: float, ended: float, *, worker: str = "api", **counts: int) -> None:
        """A worker worked on a step of the request in this time; may be called again for the same step."""
        self._steps.setdefault((name, worker), Step(began, ended)).extend(began, ended, **counts)

    def __enter__(self) -> RequestTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Send the steps, then the request; an exception is recorded and propagates."""
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(self._span)
        for (name, worker), step in self._steps.items():
            span = self._tracer.start_span(name, context=inside, start_time=self._wall_ns(step.began))
            span.set_attributes({"vidspec.worker": worker, "vidspec.busy_s": step.busy_s})
            span.set_attributes({f"vidspec.{name}": count for name, count in step.counts.items()})
            span.end(self._wall_ns(step.ended))
        status = 200 if error is None else self._status_of(error)
        self.set_attributes({"http.response.status_code": status, "error.type": kind.__name__ if kind else None})
        if error is not None:
            self.ended_by(error)
        self._span.end(self._wall_ns(time.monotonic()))

    def _wall_ns(self, monotonic: float) -> int:
        return int(monotonic * 1e9) + self._clock_ns


class Traces:
    """Sends traces to a collector; if that is slow or away, spans are lost, never requests."""

    def __init__(self, endpoint: str, version: str) -> None:
        """`endpoint` takes OTLP over HTTP, as in http://collector:4318/v1/traces.

        Raises ConfigError where the library is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError("traces need more packages: pip install 'vidspec[otel]'") from error
        resource = Resource.create({"service.version": version})  # and what OTEL_RESOURCE_ATTRIBUTES says
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # nor is OTEL_SERVICE_NAME set
            resource = resource.merge(Resource({"service.name": "vidspec"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("vidspec", version)

    def begin(self, headers: Mapping[str, str], name: str, status_of: StatusOf) -> RequestTrace | None:
        """The trace of a request, which continues W3C's `traceparent` in `headers`; None if it is not sampled.

        `status_of` gives the HTTP status of an exception.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(dict(headers))
        span = self._tracer.start_span(name, context=context, kind=SpanKind.SERVER)
        return RequestTrace(self._tracer, span, status_of) if span.is_recording() else None

    def close(self) -> None:
        """Send what is left, for some seconds at most: a collector that hangs would make every batch wait."""
        giving_up = threading.Timer(_TIMEOUT_S, self._exporter.shutdown)
        giving_up.start()
        self._provider.shutdown()
        giving_up.cancel()
