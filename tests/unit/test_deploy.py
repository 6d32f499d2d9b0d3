"""The deployment files against the code they deploy: structure, names and the probe, without a container engine.

`deploy/build_without_registry.sh` tests what needs a container engine.

`python -m tests.unit.test_deploy > deploy/env.example` rewrites that file after a change of the settings.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from vidspec_service.cli.settings_flags import default_text
from vidspec_service.settings import ENV_PREFIX, Settings, load_settings
from vidspec_service.settings.sources import API_KEY_SETTINGS

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
LAST_STAGE = DOCKERFILE.rpartition("\nFROM ")[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("vidspec", "cpu")
_ENV_HEAD = """\
# Every setting of vidspec with its default; copy to deploy/vidspec.env and change what you need.
# docker-compose.yml sets the devices itself, whatever stands here.
# `vidspec serve --help` lists the flags of the same names.
"""


def env_example() -> str:
    """The required content of deploy/env.example."""
    entries = [_ENV_HEAD]
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else default_text(field)
        entries.append(f"# {field.description}\n#{ENV_PREFIX}{name.upper()}={default}\n")
    return "\n".join(entries)


def test_env_example_lists_every_setting_with_its_description_and_default() -> None:
    assert (ROOT / "deploy/env.example").read_text() == env_example(), "see this file's first lines"


def test_env_example_gives_the_defaults_when_all_of_it_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in env_example().splitlines():
        name, _, value = line.removeprefix("#").partition("=")
        if name.startswith(ENV_PREFIX) and name.removeprefix(ENV_PREFIX).lower() not in API_KEY_SETTINGS:  # not empty
            monkeypatch.setenv(name, value)
    assert load_settings(Settings, {}) == Settings()


@pytest.mark.parametrize("service", OURS)
def test_compose_sets_only_settings_that_exist(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICES[service]["environment"].items():
        monkeypatch.setenv(name, value)
    settings = load_settings(Settings, {})
    assert settings.model == "bundled"
    assert settings.draft_device != "auto"


def test_image_sets_only_settings_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = re.findall(rf"({ENV_PREFIX}\w+)=(\S+)", DOCKERFILE)
    for name, value in variables:
        monkeypatch.setenv(name, value)
    assert (load_settings(Settings, {}).host, load_settings(Settings, {}).port) == ("0.0.0.0", 8000)


@pytest.mark.parametrize("service", [*OURS, "prometheus", "grafana"])
def test_services_run_without_privileges_on_a_read_only_root(service: str) -> None:
    spec = SERVICES[service]
    assert spec["read_only"] is True
    assert spec["cap_drop"] == ["ALL"]
    assert "no-new-privileges=true" in spec["security_opt"]  # with a colon, Docker warns and Podman refuses
    assert all(port.startswith(("127.0.0.1:", "${PUBLISH:-127.0.0.1:")) for port in spec["ports"])


def test_target_and_draft_have_a_gpu_each() -> None:
    (gpus,) = SERVICES["vidspec"]["deploy"]["resources"]["reservations"]["devices"]
    devices = {SERVICES["vidspec"]["environment"][f"VIDSPEC_{role}_DEVICE"] for role in ("TARGET", "DRAFT")}
    assert devices == {f"cuda:{index}" for index in range(len(gpus["device_ids"]))}


def test_a_plain_up_starts_no_second_service_on_the_same_port() -> None:
    assert [name for name in OURS if "profiles" not in SERVICES[name]] == ["vidspec"]


@pytest.mark.parametrize("service", OURS)
def test_containers_are_given_time_to_drain(service: str) -> None:
    grace_s = int(SERVICES[service]["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings().drain_timeout_s + 5


def test_git_ignores_an_operators_settings_and_keys() -> None:
    (settings,) = SERVICES["cpu"]["env_file"]
    assert {settings["path"], "deploy/api_keys"} <= set((ROOT / ".gitignore").read_text().split())


def test_prometheus_scrapes_the_service_by_a_name_that_both_variants_have() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["vidspec:8000"]}]
    assert SERVICES["cpu"]["networks"]["default"]["aliases"] == ["vidspec"]


def test_image_runs_the_console_script_as_nobody_special_and_checks_its_health() -> None:
    assert re.search(r"^USER 10001:10001$", LAST_STAGE, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["vidspec"\]$', LAST_STAGE, re.MULTILINE)
    assert "/health/live" in LAST_STAGE.partition("HEALTHCHECK")[2]
    start_period_s = int(re.findall(r"--start-period=(\d+)s", LAST_STAGE)[0])
    assert start_period_s > Settings().start_timeout_s


@contextmanager
def _answering(status: int) -> Iterator[int]:
    """The port of a server that answers /health/live with `status`, and anything else with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/live" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_port
        server.shutdown()


def _probed(port: int) -> bool:
    written = LAST_STAGE.partition("HEALTHCHECK")[2].partition("CMD ")[2].partition("\nENTRYPOINT")[0]
    probe = json.loads(written.replace("\\\n", ""))
    variables = {"VIDSPEC_PORT": str(port), "PATH": "/usr/bin:/bin"}
    return subprocess.run(probe, env=variables, capture_output=True, timeout=10).returncode == 0


@pytest.mark.parametrize(("status", "is_green"), [(200, True), (503, False)])
def test_the_health_probe_is_green_while_the_server_answers_with_200(status: int, is_green: bool) -> None:
    with _answering(status) as port:
        assert _probed(port) is is_green
    assert not _probed(port), "nothing listens any more"


@pytest.mark.parametrize("service", OURS)
def test_compiled_kernels_and_models_survive_a_container(service: str) -> None:
    caches = re.findall(r"^ *(?:ENV )?(?:\w+_CACHE_DIR|HF_HOME)=(\S+)", LAST_STAGE, re.MULTILINE)
    assert len(caches) == 3
    volumes = json.loads(re.findall(r"^VOLUME (.+)$", LAST_STAGE, re.MULTILINE)[0])
    mounts = dict(mount.split(":") for mount in SERVICES[service]["volumes"])
    assert sorted(mounts.values()) == sorted(volumes)
    assert mounts.keys() <= COMPOSE["volumes"].keys()
    assert all(any(Path(cache).is_relative_to(volume) for volume in volumes) for cache in caches)


def test_a_change_of_ours_leaves_the_layers_of_dependencies_as_they_are() -> None:
    ours = [LAST_STAGE.index(f"COPY --from=package {folder} /") for folder in ("/weights", "/opt/vidspec")]
    assert ours == sorted(ours)
    assert "pip install" not in LAST_STAGE[ours[0] :]
    sources = [words.split() for words in re.findall(r"^COPY (.+)$", LAST_STAGE[: ours[0]], re.MULTILINE)]
    assert sources == [["constraints.txt", "/opt/"], ["--from=requirements", "/requirements.txt", "/opt/"]]


def test_everything_that_an_image_is_made_with_is_pinned() -> None:
    installed = re.findall(r"pip (?:--python \S+ )?(?:install|wheel) (.+)", DOCKERFILE)
    assert len(installed) == 7
    assert all("constraints.txt" in command or "--no-index" in command for command in installed)
    pins = (ROOT / "constraints.txt").read_text()
    assert all(f"\n{name}==" in pins for name in ("pip", "setuptools", "hatchling", "trove-classifiers"))


def test_images_are_built_and_not_asked_of_a_registry() -> None:
    assert "syntax=" not in DOCKERFILE
    assert [SERVICES[name]["pull_policy"] for name in OURS] == ["build", "build"]


def test_an_image_for_cuda_has_the_compiler_that_triton_needs() -> None:
    assert re.search(r'if \[ "\$\{ACCELERATOR\}" = cuda \].+?install .*gcc libc6-dev', LAST_STAGE, re.DOTALL)


def test_the_script_that_builds_without_a_registry_can_be_read_by_bash() -> None:
    script = ROOT / "deploy/build_without_registry.sh"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True)
    assert set(re.findall(r"https?://([\w.]+)", script.read_text())) == {"127.0.0.1"}


def test_the_description_in_a_wheel_stands_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not re.search(r"\]\(|<img|<a ", project["readme"]["text"])


def test_image_can_copy_everything_that_it_names() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_constraints_pin_every_direct_dependency_and_name_no_index() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", line) for line in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {re.split(r"[^A-Za-z0-9-]", requirement)[0].lower() for requirement in required}
    assert names <= {line.partition("==")[0] for line in pins}


@pytest.mark.parametrize("file", ["Makefile", ".ci/run", "constraints.txt", "pyproject.toml"])
def test_builds_name_no_package_index(file: str) -> None:
    assert "://" not in (ROOT / file).read_text()


if __name__ == "__main__":
    sys.stdout.write(env_example())
