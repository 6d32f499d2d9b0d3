"""How `vidspec serve` and `vidspec check` are put together: what is built, in which order, and what is logged."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.fakes import ANSWER, FINISHED, INFO, FakeDecodePool, FakeEngine, FakeLauncher
from tests.unit.cli.test_check import facts as device_facts
from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.scene import sample_scene
from vidspec_models.request import SpeculationMode
from vidspec_models.step_path import COMPILED, StepPath, torch_fallback
from vidspec_service.api import server
from vidspec_service.bench.speed.device import DeviceFacts
from vidspec_service.cli import check, serve
from vidspec_service.cli.parsing import parse
from vidspec_service.end_signals import END_SIGNALS, obeyed_signals
from vidspec_service.engine.config import EngineConfig
from vidspec_service.errors import ConfigError, GenerationFailed
from vidspec_service.settings import Settings, api_keys
from vidspec_service.telemetry import Metrics


class _World:
    """Replaces everything that `serve` builds and records what happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *script: Any) -> None:
        self.events: list[str] = []
        self.metrics: Metrics | None = None
        self.load_error: ConfigError | None = None
        self.signalled: signal.Signals | None = None  # while the models are loaded
        self.script = script or ANSWER
        self.step_paths: dict[str, StepPath] = {}
        self.settings = Settings()
        monkeypatch.setattr(serve, "LocalEngine", self._engine)
        monkeypatch.setattr(serve, "DecodePool", self._pool)
        monkeypatch.setattr(serve, "WorkerLauncher", FakeLauncher)
        monkeypatch.setattr(server, "serve", self._serve_http)

    def run(self, *argv: str) -> int:
        command, args = parse(argv)
        return command.run(args)

    @asynccontextmanager
    async def _engine(self, config: Any, metrics: Metrics, on_loading: Any, launcher: Any) -> AsyncIterator[FakeEngine]:
        if self.load_error is not None:
            raise self.load_error
        if self.signalled is not None:
            signal.raise_signal(self.signalled)
            await asyncio.Event().wait()
        self.metrics = metrics
        self.events.append("engine up")
        engine = FakeEngine(*self.script)
        engine.step_paths = self.step_paths
        yield engine
        self.events.append("engine down")

    @asynccontextmanager
    async def _pool(self, limits: Any, max_workers: int) -> AsyncIterator[FakeDecodePool]:
        self.events.append("pool up")
        yield FakeDecodePool()
        self.events.append("pool down")

    async def _serve_http(
        self, settings: Any, engine: Any, pool: Any, metrics: Any, listener: socket.socket, remotes: Any
    ) -> None:
        assert metrics is self.metrics
        self.settings = settings
        with socket.create_connection(listener.getsockname(), timeout=1):
            self.events.append("serving, connections wait")


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in END_SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture(autouse=True)
def _logging_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)


def test_everything_is_up_before_serving_and_down_in_reverse_after(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    assert world.run("serve", "--port", "0") == 0
    assert world.events == ["engine up", "pool up", "serving, connections wait", "pool down", "engine down"]


def test_a_key_file_may_be_a_pipe_which_can_be_read_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a shell's `--api-key-file <(...)`."""
    world, (reads, writes) = _World(monkeypatch), os.pipe()
    os.write(writes, b"key-0123456789abcdef\n")
    os.close(writes)
    world.run("serve", "--port", "0", "--api-key-file", f"/dev/fd/{reads}")
    os.close(reads)
    assert api_keys(world.settings) == {"key-0123456789abcdef"}


def test_once_ready_it_says_where_and_how_to_ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _World(monkeypatch).run("serve", "--port", "0", "--host", "0.0.0.0")
    said = capsys.readouterr().out
    assert "serves fake-target at http://localhost:" in said
    assert "(target on cpu, draft on cpu; loaded in " in said
    url = re.findall(r"http://localhost:\d+", said)[0]
    assert f"Open {url} in a browser" in said
    assert f"chat clip.mp4 'How many objects are there?' --url {url}\n" in said


def test_it_suggests_what_the_readme_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/vidspec"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no active virtual environment
    _World(monkeypatch).run("serve", "--port", "0")
    commands = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(commands) == 2
    readme = (Path(__file__).parents[3] / "README.md").read_text().splitlines()
    assert {command.partition(" --url")[0] for command in commands} <= set(readme)


@pytest.mark.parametrize(
    ("url", "flag"),
    [
        ("http://127.0.0.1:8000", ""),
        ("http://localhost:8000", ""),
        ("http://10.0.0.5:8000", " --url http://10.0.0.5:8000"),
    ],
)
def test_it_suggests_an_address_unless_it_is_where_the_command_asks_by_itself(
    url: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    decode_pool: Any = FakeDecodePool()
    metrics = Metrics(CollectorRegistry())
    service = serve.RunningService(metrics=metrics, engine=FakeEngine(), decode_pool=decode_pool, load_s=1.0)
    serve.announce(Settings(), service, url)
    assert f"chat clip.mp4 'How many objects are there?'{flag}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("started_as", "on_path", "shown"),
    [
        (".venv/bin/vidspec", None, "  .venv/bin/vidspec render-clip"),
        ("/opt/bin/vidspec", "/opt/bin/vidspec", "  vidspec render-clip"),
        ("/site/vidspec_service/__main__.py", None, "  vidspec render-clip"),
    ],
)
def test_the_first_command_it_suggests_is_one_that_can_be_typed(
    started_as: str,
    on_path: str | None,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", [started_as])
    monkeypatch.setattr("shutil.which", lambda _: on_path)
    _World(monkeypatch).run("serve", "--port", "0")
    assert shown in capsys.readouterr().out.splitlines()[2]


@pytest.mark.parametrize(("asked", "is_told"), [("8", False), ("16", True)])
def test_more_default_frames_than_the_model_was_made_for_are_told(
    asked: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tests.fakes.INFO", replace(INFO, max_frames=8))
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    _World(monkeypatch).run("serve", "--port", "0", "--default-num-frames", asked)
    assert ("the model was made for fewer frames" in caplog.text) is is_told


@pytest.mark.parametrize(("asked", "is_told"), [(INFO.context_length, False), (INFO.context_length + 1, True)])
def test_a_longer_context_than_the_model_has_is_told(
    asked: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    _World(monkeypatch).run("serve", "--port", "0", "--max-context", str(asked))
    assert ("the context is shorter than asked" in caplog.text) is is_told


def test_a_compression_that_the_model_cannot_use_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    with pytest.raises(ConfigError, match=r"--compression: .* use vidcom2 instead"):
        world.run("serve", "--port", "0", "--compression", "earlytom")
    assert world.events == ["engine up"]


def test_steps_that_are_several_times_slower_are_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    world = _World(monkeypatch)
    world.step_paths = {"target": COMPILED, "draft": torch_fallback("the kernels do not compile", "install numba")}
    world.run("serve", "--port", "0")
    (warned,) = [vars(each) for each in caplog.records if each.levelno == logging.WARNING]
    assert (warned["worker"], warned["remedy"]) == ("draft", "install numba")


def test_in_json_the_same_facts_are_one_log_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _World(monkeypatch).run("serve", "--port", "0", "--log-format", "json")
    shown = capsys.readouterr()
    assert shown.out == ""
    loading, ready = (json.loads(line) for line in shown.err.splitlines())
    assert (loading["event"], loading["model"]) == ("loading", "bundled")
    assert (ready["event"], ready["model"], ready["devices"]) == ("ready", "fake-target", INFO.devices)


def test_versions_and_devices_are_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    world.run("serve", "--port", "0")
    assert world.metrics is not None
    page = world.metrics.exposition("fake-target").decode()
    assert 'model="fake-target"' in page
    assert 'target_device="cpu"' in page


def test_a_taken_port_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="cannot bind"):
        world.run("serve", "--port", str(other.getsockname()[1]))
    assert world.events == []


def test_a_machine_without_a_folder_for_uploads_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a container whose root is read-only, without a tmpfs at /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc", "/sys"])
    world = _World(monkeypatch)
    with pytest.raises(ConfigError, match=r"cannot use upload_dir: No usable temporary directory .*'/proc', '/sys'"):
        world.run("serve", "--port", "0")
    assert world.events == []


def test_a_model_that_is_not_there_ends_the_start_before_any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    with pytest.raises(ConfigError, match="target model '/no/model' is neither a folder"):
        world.run("serve", "--port", "0", "--model", "/no/model")
    assert world.events == []


@pytest.mark.parametrize(("flags", "is_told"), [([], False), (["--api-key", "key-0123456789abcdef"], True)])
def test_a_key_that_others_on_the_machine_can_read_is_told(
    flags: list[str], is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    _World(monkeypatch).run("serve", "--port", "0", *flags)
    assert ("others on this machine can read it" in caplog.text) is is_told


def test_a_model_that_does_not_load_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    world.load_error = ConfigError("target model folder '/x' does not exist")
    with pytest.raises(ConfigError, match="does not exist"):
        world.run("serve", "--port", "0")
    assert world.events == []


@pytest.mark.parametrize("number", obeyed_signals())  # not SIGHUP under nohup
def test_a_signal_while_the_models_are_loaded_is_an_orderly_end(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = _World(monkeypatch)
    world.signalled = number
    assert world.run("serve", "--port", "0", "--log-level", "warning") == 0
    assert (world.events, capsys.readouterr()) == ([], ("", ""))


def test_check_answers_about_a_clip_and_tells_the_truth_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = _World(monkeypatch)
    assert world.run("check", "--seed", "5") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["target"] == "fake-target on cpu, context 1024 tokens"
    assert rows["draft"] == "fake-draft on cpu"
    assert rows["answer"] == "A red squäre."
    assert rows["truth"] == caption(sample_scene(5))
    assert world.events == ["engine up", "pool up", "pool down", "engine down"]


@pytest.mark.parametrize(
    ("asked", "used", "expected"),
    [
        ("auto", "parallel", "parallel, 75% accepted"),
        ("auto", "off", "off: auto expected no gain from it now"),
        ("off", "off", "off"),
    ],
)
def test_check_says_why_nothing_was_speculated(
    asked: str, used: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = replace(FINISHED, speculation=replace(FINISHED.speculation, mode=SpeculationMode(used)))
    assert _World(monkeypatch, *ANSWER[:-1], finished).run("check", "--speculation", asked) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["speculation"] == expected


def test_check_measures_a_device_after_the_service_if_that_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(pair: EngineConfig, shape: str, *_: object) -> DeviceFacts:
        assert (pair.target.device, shape, world.events[-1]) == ("cpu", "small", "engine down")
        return device_facts()

    monkeypatch.setattr(check, "measure_device", measured)
    world = _World(monkeypatch)
    assert world.run("check", "--device", "cpu") == 0
    assert "9 of 9 answers" in capsys.readouterr().out
    monkeypatch.setattr(check, "measure_device", None)
    assert _World(monkeypatch, GenerationFailed("lost")).run("check", "--device", "cpu") == 1


def test_check_of_an_engine_that_does_not_answer_is_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = _World(monkeypatch, GenerationFailed("out of memory"))
    assert world.run("check") == 1
    shown = capsys.readouterr()
    assert "vidspec check: HTTP 500: " in shown.err
    assert "verdict     the service does not answer: HTTP 500" in shown.out
    assert world.events[-1] == "engine down"


def settings_for(*argv: str) -> Settings:
    """The settings that `vidspec serve` reads from a command line."""
    _, args = parse(("serve", *argv))
    return serve.settings_for(args)


def test_what_vllm_serve_is_given_means_the_same_here() -> None:
    settings = settings_for(
        "org/model", "--max-model-len", "4096", "--max-num-seqs", "3", "--dtype", "bfloat16", "--served-model-name",
        "a,b", "c", "--api-key", "key-0123456789abcdef", "--gpu-memory-utilization", "0.8",
    )  # fmt: skip
    assert (settings.model, settings.max_context, settings.max_running_requests) == ("org/model", 4096, 3)
    assert settings.gpu_memory_utilization == 0.8
    assert (settings.target_dtype, settings.served_model_name) == ("bfloat16", ("a", "b", "c"))
    assert api_keys(settings) == {"key-0123456789abcdef"}


def test_two_models_on_one_command_line_are_a_mistake() -> None:
    assert settings_for("org/model", "--model", "org/model").model == "org/model"
    with pytest.raises(ConfigError, match="the model is given twice: org/model and --model other"):
        settings_for("org/model", "--model", "other")
