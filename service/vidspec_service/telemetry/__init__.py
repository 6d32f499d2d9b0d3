"""What the service says about itself: log lines and metrics. Knows neither HTTP nor models."""

from vidspec_service.telemetry.logs import configure_logging, request_id_var
from vidspec_service.telemetry.metrics import Metrics

__all__ = ["Metrics", "configure_logging", "request_id_var"]
