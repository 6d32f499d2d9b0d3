"""Dashboard and alerts against the metrics they read: a query for a name that is never exported stays empty."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboards/vidspec.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"][0]["rules"]
QUERIES = {
    **{f"{panel['title']}: {target['expr']}": target["expr"] for panel in PANELS for target in panel["targets"]},
    **{alert["alert"]: alert["expr"] for alert in ALERTS},
}
SCRAPED = {"job", "instance", "model_name", "le"}  # labels that are not declared by our metrics
_NAME = re.compile(r"\b(?:vidspec:\w+|process_\w+)")
_LABELS = re.compile(r"by \(([\w, ]+)\)|(\w+)=~?\"")


def labels_by_name() -> dict[str, set[str]]:
    """Every series on the page at /metrics, with its labels."""
    registry = CollectorRegistry()
    Metrics(registry)
    told = {sample.name: set[str]() for metric in registry.collect() for sample in metric.samples}
    for collector, names in registry._collector_to_names.items():
        told |= {name: set(getattr(collector, "_labelnames", ())) for name in names}
    return told


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_query_reads_what_the_service_writes(query: str) -> None:
    known = labels_by_name()
    names = _NAME.findall(query)
    assert names or query.startswith("up{")
    assert set(names) <= known.keys()
    used = {label.strip() for found in _LABELS.findall(query) for label in "".join(found).split(",")}
    assert used <= SCRAPED.union(*(known[name] for name in names))


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_number_of_events_is_reached_not_passed(query: str) -> None:
    """Prometheus extrapolates: two events in a quarter of an hour are an increase of 2.007, say."""
    assert not re.search(r"increase\(.*\) > \d", query)


def test_a_server_that_starts_pages_nobody() -> None:
    (down,) = (alert for alert in ALERTS if alert["alert"] == "VidspecDown")
    assert 60 * int(down["for"].removesuffix("m")) > Settings().start_timeout_s


def test_every_panel_says_what_it_shows_and_chooses_the_model() -> None:
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            assert "model_name=~" in target["expr"], panel["title"]
            assert "job=" not in target["expr"], "a Prometheus of one's own names its jobs as it likes"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_rules_are_loaded() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    mounts = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["prometheus"]["volumes"]
    assert "./deploy/alerts.yml:/etc/prometheus/alerts.yml:ro" in mounts
