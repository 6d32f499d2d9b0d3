"""Logs, metrics and traces. Knows neither HTTP nor models."""

from vidspec_service.telemetry.logs import configure_logging, request_id_var
from vidspec_service.telemetry.metrics import EngineMetrics, Metrics
from vidspec_service.telemetry.traces import RequestTrace, Traces

__all__ = ["EngineMetrics", "Metrics", "RequestTrace", "Traces", "configure_logging", "request_id_var"]
