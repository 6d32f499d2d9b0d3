"""Exit codes and last words of the process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vidspec_models.errors import ModelLoadError
from vidspec_service import __main__ as process
from vidspec_service.errors import ConfigError


def _ending_with(outcome: BaseException | int) -> SimpleNamespace:
    def run(_: object) -> int:
        if isinstance(outcome, int):
            return outcome
        raise outcome

    return SimpleNamespace(run=run)


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (ConfigError("port 80 is taken"), 2, "vidspec: port 80 is taken\n"),
        (ModelLoadError("they share no tokenizer"), 2, "vidspec: they share no tokenizer\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_ending_has_its_exit_code_and_at_most_one_line(
    outcome: BaseException | int,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process, "parse", lambda _: (_ending_with(outcome), None))
    assert process.main() == code
    assert capsys.readouterr() == ("", said)


def test_a_wrong_command_line_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["vidspec", "serve", "--prot"])
    assert process.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_wrong_setting_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["vidspec", "serve", "--max-frames", "none"])
    assert process.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("vidspec: --max-frames: ")
    assert error.count("\n") == 1
