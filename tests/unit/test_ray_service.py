"""A cluster's manifest: its pods are valid by Kubernetes' schemas, its application by Ray's and our settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay import node_provider
from ray.serve.schema import ServeDeploySchema

from vidspec_service.api.limits.deadline import MAX_EXTENSION_S
from vidspec_service.cluster.application import application_of
from vidspec_service.settings import ClusterSettings, load_settings

FILE = Path(__file__).parents[2] / "deploy/kubernetes/ray-service.yaml"
MANIFESTS: dict[str, dict[str, Any]] = {found["kind"]: found for found in yaml.safe_load_all(FILE.read_text())}
CLUSTER: dict[str, Any] = MANIFESTS["RayService"]["spec"]["rayClusterConfig"]
(ENGINES,) = CLUSTER["workerGroupSpecs"]
(AUTOSCALERS,) = CLUSTER["autoscalerOptions"]["volumeMounts"]
IN_CLUSTER = Path(node_provider.IN_CLUSTER_TOKEN_PATH).parent
SERVED: dict[str, Any] = yaml.safe_load(MANIFESTS["RayService"]["spec"]["serveConfigV2"])
(APPLICATION,) = SERVED["applications"]
METRICS = {"name": "metrics", "containerPort": 8080}  # KubeRay's port


def settings() -> ClusterSettings:
    return load_settings(ClusterSettings, APPLICATION["args"])


@pytest.mark.parametrize("group", [CLUSTER["headGroupSpec"], ENGINES], ids=["head", "engines"])
def test_a_pod_of_the_cluster_is_valid_and_has_no_unknown_field(group: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
    kubernetes_validate.validate(pod, "1.37", strict=True)
    (container,) = group["template"]["spec"]["containers"]
    volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]} - {AUTOSCALERS["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_kuberay_knows_the_token_and_which_ray_it_is() -> None:
    """A token that only the pods know keeps KubeRay's operator and Ray's autoscaler out, too."""
    assert CLUSTER["authOptions"] == {"mode": "token"}
    own = {each["name"] for each in ENGINES["template"]["spec"]["containers"][0]["env"]}
    assert not {name for name in own if name.startswith("RAY_AUTH")}
    constraints = FILE.parents[2].joinpath("constraints.txt").read_text().splitlines()
    assert f"ray=={CLUSTER['rayVersion']}" in constraints
    # What KubeRay would add runs a program that the image does not have.
    assert ENGINES["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"] == {
        "path": "/-/healthz",
        "port": SERVED["http_options"]["port"],
    }


def test_the_autoscaler_and_nothing_beside_it_may_talk_to_kubernetes() -> None:
    assert AUTOSCALERS["mountPath"] == str(IN_CLUSTER)
    head = CLUSTER["headGroupSpec"]["template"]["spec"]
    assert not head["automountServiceAccountToken"]
    (sources,) = (each["projected"]["sources"] for each in head["volumes"] if each["name"] == AUTOSCALERS["name"])
    paths = {sources[0]["serviceAccountToken"]["path"], sources[1]["configMap"]["items"][0]["path"]}
    assert {str(IN_CLUSTER / path) for path in paths} == {
        node_provider.IN_CLUSTER_TOKEN_PATH,
        node_provider.IN_CLUSTER_CA_CERT_PATH,
    }


def test_only_pods_of_the_cluster_reach_more_than_its_port() -> None:
    policy = MANIFESTS["NetworkPolicy"]
    kubernetes_validate.validate(policy, "1.37", strict=True)
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    for group in (CLUSTER["headGroupSpec"], ENGINES):
        assert group["template"]["metadata"]["labels"] == chosen
    to_all, _, to_prometheus = policy["spec"]["ingress"]
    assert to_all == {"ports": [{"port": SERVED["http_options"]["port"]}]}
    assert to_prometheus["ports"] == [{"port": METRICS["containerPort"]}]


def test_the_engines_figures_are_scraped_from_every_pod() -> None:
    monitor = MANIFESTS["PodMonitor"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == METRICS["name"]
    for group in (CLUSTER["headGroupSpec"], ENGINES):
        assert METRICS in group["template"]["spec"]["containers"][0]["ports"]
        assert group["template"]["metadata"]["labels"] == monitor["spec"]["selector"]["matchLabels"]


def test_a_reload_of_the_proxy_cuts_no_stream_that_may_still_run() -> None:
    env = {each["name"]: each.get("value") for each in ENGINES["template"]["spec"]["containers"][0]["env"]}
    assert env["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert float(env["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > settings().request_timeout_s + MAX_EXTENSION_S


def test_what_ray_serve_is_told_is_what_it_understands() -> None:
    ServeDeploySchema.model_validate(SERVED)
    module, name = APPLICATION["import_path"].split(":")
    assert (module, name) == ("vidspec_service.cluster.application", "application")


def test_an_engine_fits_a_pod_and_no_more_are_wanted_than_there_can_be() -> None:
    (container,) = ENGINES["template"]["spec"]["containers"]
    found = settings()
    assert found.engine_gpus == float(container["resources"]["limits"]["nvidia.com/gpu"])
    assert found.engine_cpus <= float(ENGINES["rayStartParams"]["num-cpus"])
    assert found.engines == f"{ENGINES['minReplicas']}-{ENGINES['maxReplicas']}"


def test_the_application_is_two_deployments_that_are_scaled_as_the_settings_say() -> None:
    frontends = application_of(settings())._bound_deployment
    engines = frontends.init_args[1]._bound_deployment
    for deployment in (frontends, engines):
        scaling = deployment._deployment_config.autoscaling_config
        assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert engines.ray_actor_options == {"num_cpus": 4.0, "num_gpus": 2.0}
    assert (
        application_of(ClusterSettings(engines="3"))._bound_deployment.init_args[1]._bound_deployment.num_replicas == 3
    )


@pytest.mark.parametrize(("engine_drain_s", "ends_within_s"), [(90.0, 90.0), (None, 30.0)])
def test_an_engine_takes_twice_what_it_generates_has_help_before_and_ends_after_its_answers(
    engine_drain_s: float | None, ends_within_s: float
) -> None:
    asked = ClusterSettings(
        engines="1-4", max_running_requests=16, engine_drain_s=engine_drain_s, drain_timeout_s=30, engine_idle_s=7
    )
    frontends = application_of(asked)._bound_deployment
    engines = frontends.init_args[1]._bound_deployment._deployment_config
    assert engines.max_ongoing_requests == 32
    assert engines.autoscaling_config.target_ongoing_requests == 12
    assert engines.autoscaling_config.downscale_delay_s == 7
    assert engines.graceful_shutdown_timeout_s == ends_within_s
    assert frontends._deployment_config.graceful_shutdown_timeout_s == 30
