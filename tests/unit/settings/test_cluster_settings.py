"""A cluster's settings have the same sources as a server's, and do not confuse a server on the same machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from vidspec_service.errors import ConfigError
from vidspec_service.settings import ClusterSettings, ReplicaRange, Settings, load_settings


@pytest.mark.parametrize(
    ("text", "copies"), [("2", ReplicaRange(2, 2)), ("1-8", ReplicaRange(1, 8)), ("0-4", ReplicaRange(0, 4))]
)
def test_copies_are_a_number_or_a_range(text: str, copies: ReplicaRange) -> None:
    assert ReplicaRange.parse(text) == copies


@pytest.mark.parametrize("text", ["0", "3-2", "0-0", "-1", "1-", "many", "1.5", ""])
def test_what_is_no_number_of_copies_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--engines: expected"):
        load_settings(ClusterSettings, {"engines": text})


@pytest.mark.parametrize("amount", ["-1", "inf", "nan"])
@pytest.mark.parametrize("name", ["engine_cpus", "engine_gpus", "frontend_cpus"])
def test_what_is_no_amount_that_ray_can_reserve_is_refused(name: str, amount: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: "):
        load_settings(ClusterSettings, {name: amount})


def test_one_is_enough_and_a_number_in_ray_serves_yaml() -> None:
    found = load_settings(ClusterSettings, {"engines": 1, "frontends": "1"})
    assert (found.engines, found.frontends) == ("1", "1")


@pytest.mark.parametrize(
    ("name", "amount", "why"),
    [
        ("engine_gpus", "1.5", "a whole number"),
        ("engine_gpus", "0.33333", "four decimal places"),
        ("engine_cpus", "0.00001", "four decimal places"),
    ],
)
def test_an_amount_that_ray_refuses_is_refused_before_a_cluster_is_started(name: str, amount: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: .*{why}"):
        load_settings(ClusterSettings, {name: amount})


@pytest.mark.parametrize(("name", "amount"), [("engine_gpus", 2), ("engine_gpus", 0.25), ("engine_cpus", 1.5)])
def test_engines_may_share_gpus_and_processors(name: str, amount: float) -> None:
    assert getattr(load_settings(ClusterSettings, {name: str(amount)}), name) == amount


def test_there_is_always_a_frontend() -> None:
    with pytest.raises(ConfigError, match="nothing listens"):
        load_settings(ClusterSettings, {"frontends": "0-2"})


def test_a_file_a_variable_and_a_flag_make_the_settings_of_server_and_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("engines: 3\nengine_gpus: 2\nmodel: /models/target\nfrontends: 1-2\n")
    monkeypatch.setenv("VIDSPEC_FRONTENDS", "2")
    found = load_settings(ClusterSettings, {"engine_gpus": "4"}, config)
    assert (found.engines, found.frontends, found.engine_gpus, found.model) == ("3", "2", 4.0, "/models/target")


def test_a_misspelt_setting_of_the_cluster_is_told_the_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean engine_gpus"):
        load_settings(ClusterSettings, {"engine_gpu": "4"})


def test_a_server_ignores_what_is_a_clusters_in_variables_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIDSPEC_ENGINES", "2")
    config = tmp_path / "cluster.yaml"
    config.write_text("engines: none\nport: 9000\n")
    monkeypatch.setenv("VIDSPEC_CONFIG", str(config))
    assert load_settings(Settings, {}) == Settings(port=9000)
    assert type(load_settings(Settings, {})) is Settings
    config.write_text("engine: 2\n")
    with pytest.raises(ConfigError, match=r"unknown key in .* engine; did you mean engines"):
        load_settings(Settings, {})
