"""`train-bundled` and `eval-bundled` pass their options on; the work itself is tested with the models."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.errors import ModelLoadError
from vidspec_models.training.evaluation import Gate
from vidspec_models.training.options import TrainOptions
from vidspec_service.cli import eval_bundled
from vidspec_service.cli.parsing import UsageError, parse
from vidspec_service.errors import ConfigError


def _run(*argv: str) -> int:
    command, args = parse(argv)
    return command.run(args)


def test_training_without_flags_has_the_defaults_of_its_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[TrainOptions] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vidspec_models.training.stages", SimpleNamespace(train=given.append))
    assert _run("train-bundled", "--output-dir", "out") == 0
    assert given == [TrainOptions(work_dir=Path("build/train"), output_dir=Path("out"))]


def test_training_flags_become_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[TrainOptions] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vidspec_models.training.stages", SimpleNamespace(train=given.append))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    Path("w").mkdir()
    Path("w/tower.pt").touch()
    flags = "--output-dir out --work-dir w --joint-minutes 3 --stages distil joint --device cuda:1 --seed 9 --no-resume"
    assert _run("train-bundled", *flags.split(), "--no-compile") == 0
    assert given == [
        TrainOptions(
            work_dir=Path("w"),
            output_dir=Path("out"),
            joint_minutes=3.0,
            stages=("joint", "distil"),
            device="cuda:1",
            seed=9,
            resume=False,
            compile_models=False,
        )
    ]


@pytest.mark.parametrize("flag", ["--output-dir", "--work-dir"])
def test_a_folder_that_cannot_be_written_is_told_before_hours_of_training(
    flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[TrainOptions] = []
    monkeypatch.setitem(sys.modules, "vidspec_models.training.stages", SimpleNamespace(train=given.append))
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(ConfigError, match="cannot write into file: File exists"):
        _run("train-bundled", "--output-dir", "out", flag, "file")
    assert given == []


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (["joint"], "stage joint begins from stage tower, of which .* has no checkpoint: add it to --stages$"),
        (["tower", "distil"], "stage distil begins from stage joint, .* or start from the installed weights"),
    ],
)
def test_a_stage_without_what_it_begins_from_is_told_before_hours_of_training(
    stages: list[str], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[TrainOptions] = []
    monkeypatch.setitem(sys.modules, "vidspec_models.training.stages", SimpleNamespace(train=given.append))
    with pytest.raises(ConfigError, match=told):
        _run("train-bundled", "--output-dir", str(tmp_path), "--work-dir", str(tmp_path), "--stages", *stages)
    assert given == []


@pytest.mark.parametrize("command", [["train-bundled", "--from-shipped", "--stages", "distil"], ["eval-bundled"]])
@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_a_device_that_cannot_be_is_refused_before_anything_is_written(
    command: list[str], device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vidspec_models.training.stages", SimpleNamespace(train=None))
    monkeypatch.setitem(sys.modules, "vidspec_models.training.evaluation", _Evaluation())
    folders = ["--pair", str(_pair(tmp_path))]
    if command[0] == "train-bundled":
        folders = ["--output-dir", str(tmp_path / "out"), "--work-dir", str(tmp_path / "work")]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelLoadError, match=f"device '{device}' (is not one of cpu, cuda, cuda:N|does not exist)"):
        _run(*command, *folders, "--device", device)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("flag", "value"), [("--seed", "-1"), ("--tower-minutes", "nan"), ("--distil-minutes", "-1")])
def test_a_number_that_training_cannot_use_is_refused(flag: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{flag}: must be 0 or more"):
        parse(["train-bundled", "--output-dir", "out", flag, value])


@pytest.mark.slow
def test_what_ships_is_reopened_for_the_last_stages_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shipped weights become the joint stage's checkpoint; reopening again would replace a run's own checkpoint."""
    given: list[TrainOptions] = []
    monkeypatch.setitem(sys.modules, "vidspec_models.training.stages", SimpleNamespace(train=given.append))
    flags = ["train-bundled", "--output-dir", str(tmp_path / "out"), "--work-dir", str(tmp_path), "--from-shipped"]
    with pytest.raises(ConfigError, match="--stages widen harden distil"):
        _run(*flags)
    assert _run(*flags, "--stages", "harden", "distil", "--harden-minutes", "9") == 0
    assert [(options.stages, options.harden_minutes) for options in given] == [(("harden", "distil"), 9.0)]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["joint.pt", "tower.pt"]
    with pytest.raises(ConfigError, match="is there already"):
        _run(*flags, "--stages", "distil")


def test_a_work_folder_with_some_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "joint.pt").touch()
    flags = f"--output-dir {tmp_path / 'out'} --work-dir {work} --from-shipped --stages distil"
    with pytest.raises(ConfigError, match=r"joint.pt is there already"):
        _run("train-bundled", *flags.split())
    assert [path.name for path in work.iterdir()] == ["joint.pt"]


class _Evaluation:
    """Replaces the module that measures."""

    def __init__(self, *found: Gate) -> None:
        self._found = list(found)
        self.asked: list[tuple[Any, ...]] = []

    def evaluate(
        self, target: Path, draft: Path, *, num_clips: int, device: str, dtype: str, draft_dtype: str
    ) -> dict[str, Any]:
        self.asked.append((target, draft, num_clips, device, dtype, draft_dtype))
        return {"num_clips": num_clips}

    def format_table(self, result: dict[str, Any]) -> str:
        return f"| {result['num_clips']} |"

    def gates(self, _: dict[str, Any]) -> list[Gate]:
        return self._found


def _pair(folder: Path) -> Path:
    for role, shipped in (("target", BUNDLED_TARGET), ("draft", BUNDLED_DRAFT)):
        (folder / role).symlink_to(shipped)
    return folder


def test_evaluation_prints_its_tables_and_writes_figures_and_gates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, report = _pair(tmp_path), tmp_path / "report.json"
    evaluation = _Evaluation(Gate("acceptance all", 0.95, 0.92, True))
    monkeypatch.setitem(sys.modules, "vidspec_models.training.evaluation", evaluation)
    assert (
        _run("eval-bundled", "--pair", str(pair), "--clips", "5", "--json", str(report), "--draft-dtype", "int8") == 0
    )
    assert evaluation.asked == [(pair / "target", pair / "draft", 5, "cpu", "auto", "int8")]
    assert capsys.readouterr() == ("| 5 |\n", "")
    assert json.loads(report.read_text()) == {
        "num_clips": 5,
        "gates": [{"name": "acceptance all", "value": 0.95, "bound": 0.92, "passed": True}],
    }


def test_figures_are_in_their_file_though_nobody_reads_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_reads(_: str) -> None:
        raise BrokenPipeError

    monkeypatch.setitem(sys.modules, "vidspec_models.training.evaluation", _Evaluation())
    monkeypatch.setattr(eval_bundled, "say", nobody_reads)
    with pytest.raises(BrokenPipeError):
        _run("eval-bundled", "--pair", str(_pair(tmp_path)), "--clips", "5", "--json", str(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == {"num_clips": 5, "gates": []}


def test_the_table_is_printed_though_the_figures_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vidspec_models.training.evaluation", _Evaluation())
    with pytest.raises(OSError, match="No space left"):
        _run("eval-bundled", "--pair", str(_pair(tmp_path)), "--clips", "5", "--json", "/dev/full")
    assert capsys.readouterr().out == "| 5 |\n"


def test_a_missed_gate_is_named_and_makes_the_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = _Evaluation(Gate("acceptance all", 0.9, 0.92, False), Gate("captions", 0.6, 0.5, True))
    monkeypatch.setitem(sys.modules, "vidspec_models.training.evaluation", evaluation)
    assert _run("eval-bundled", "--pair", str(_pair(tmp_path))) == 1
    assert capsys.readouterr().err == "vidspec eval-bundled: missed acceptance all\n"


def test_without_a_folder_the_shipped_pair_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    evaluation = _Evaluation()
    monkeypatch.setitem(sys.modules, "vidspec_models.training.evaluation", evaluation)
    pair = _pair(tmp_path)
    monkeypatch.setattr(eval_bundled, "BUNDLED_TARGET", pair / "target")
    monkeypatch.setattr(eval_bundled, "BUNDLED_DRAFT", pair / "draft")
    assert _run("eval-bundled") == 0
    assert evaluation.asked == [(pair / "target", pair / "draft", 200, "cpu", "auto", "auto")]


def test_a_folder_without_a_pair_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train-bundled"):
        _run("eval-bundled", "--pair", str(tmp_path))


def test_a_damaged_pair_is_a_configuration_error(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_TARGET, tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"target has a damaged or incomplete file: model\.safetensors"):
        _run("eval-bundled", "--pair", str(tmp_path))


def test_no_clips_are_no_evaluation() -> None:
    with pytest.raises(UsageError, match="--clips: must be 1 or more, not 0"):
        _run("eval-bundled", "--clips", "0")
