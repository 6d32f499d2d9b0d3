"""The Kubernetes manifests: valid by the published schemas, and consistent with the image and with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from vidspec_service.settings import ENV_PREFIX, Settings, load_settings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy/kubernetes/vidspec.yaml").read_text()
MANIFESTS: dict[str, dict[str, Any]] = {found["kind"]: found for found in yaml.safe_load_all(TEXT)}
POD: dict[str, Any] = MANIFESTS["Deployment"]["spec"]["template"]
CONTAINER: dict[str, Any] = POD["spec"]["containers"][0]
OF_THE_CORE = [kind for kind in MANIFESTS if kind != "PodMonitor"]  # the Prometheus operator defines that


@pytest.mark.parametrize("kind", OF_THE_CORE)
def test_a_manifest_is_valid_and_has_no_unknown_field(kind: str) -> None:
    kubernetes_validate.validate(MANIFESTS[kind], "1.37", strict=True)


def test_a_misspelt_field_is_found() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(MANIFESTS["Service"] | {"specs": {}}, "1.37", strict=True)


def test_everything_chooses_the_pods_of_the_deployment() -> None:
    labels = POD["metadata"]["labels"].items()
    chosen = [
        MANIFESTS[kind]["spec"]["selector"]["matchLabels"]
        for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor")
    ]
    for selector in (*chosen, MANIFESTS["Service"]["spec"]["selector"]):
        assert selector.items() <= labels
    scaled = MANIFESTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert scaled["name"] == MANIFESTS["Deployment"]["metadata"]["name"]


def test_ports_probes_and_paths_are_the_images() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    (port,) = CONTAINER["ports"]
    assert f"EXPOSE {port['containerPort']}" in dockerfile
    ports = [MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"]]
    ports += [MANIFESTS["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"]]
    ports += [CONTAINER[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness", "readiness")]
    assert set(ports) == {port["name"]}
    mounted = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {"/tmp", "/var/cache/vidspec", "/var/cache/huggingface"}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {
        volume["name"] for volume in POD["spec"]["volumes"]
    }
    assert (
        f"USER {POD['spec']['securityContext']['runAsUser']}:{POD['spec']['securityContext']['runAsGroup']}"
        in dockerfile
    )


def test_to_apply_the_manifest_again_undoes_nothing_that_the_autoscaler_chose() -> None:
    assert "replicas" not in MANIFESTS["Deployment"]["spec"]


def test_pods_are_scraped_as_the_job_that_the_alerts_name() -> None:
    job = POD["metadata"]["labels"][MANIFESTS["PodMonitor"]["spec"]["jobLabel"]]
    assert f'up{{job="{job}"}}' in (ROOT / "deploy/alerts.yml").read_text()


def test_only_settings_that_exist_are_set_and_waits_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in CONTAINER["env"]:
        assert variable["name"].startswith(ENV_PREFIX)
        monkeypatch.setenv(variable["name"], variable["value"])
    assert load_settings(Settings, {}).target_device == "cuda:1"
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > Settings().start_timeout_s
    pause_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["spec"]["terminationGracePeriodSeconds"] > Settings().drain_timeout_s + pause_s
    assert POD["spec"]["enableServiceLinks"] is False
