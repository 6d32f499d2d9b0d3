"""What a verification adds to the metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tests.unit.telemetry.test_telemetry import samples
from vidspec_service.engine.frontend.client import count_verified
from vidspec_service.telemetry import Metrics

pytestmark = pytest.mark.unit


def test_speculation_is_counted_as_vllm_counts_it() -> None:
    metrics = Metrics(CollectorRegistry())
    count_verified(metrics, num_draft_tokens=3, num_accepted_tokens=2)
    count_verified(metrics, num_draft_tokens=1, num_accepted_tokens=0)
    found = samples(metrics)
    assert found["vidspec:spec_decode_num_drafts_total"] == 2
    assert found["vidspec:spec_decode_num_draft_tokens_total"] == 4
    assert found["vidspec:spec_decode_num_accepted_tokens_total"] == 2
    assert found["vidspec:spec_decode_num_accepted_tokens_per_pos_total|0"] == 1
    assert found["vidspec:spec_decode_num_accepted_tokens_per_pos_total|1"] == 1
    assert "vidspec:spec_decode_num_accepted_tokens_per_pos_total|2" not in found
