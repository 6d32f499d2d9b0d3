"""Flags made from settings."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from vidspec_service.cli.settings_flags import add_settings_flags, default_text, settings_of
from vidspec_service.errors import ConfigError
from vidspec_service.settings import SECRETS, Settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, width=1000))
    add_settings_flags(parser)
    return parser


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name not in SECRETS])
def test_every_setting_is_a_flag_whose_help_names_its_variable_and_its_default(name: str) -> None:
    shown = re.sub(r"\s+", " ", _parser().format_help())
    flag = f"--{name.replace('_', '-')}"
    about = re.search(
        rf" {flag}[, ][^\[]*(?:\[NAME \.\.\.\][^\[]*)?\[VIDSPEC_{name.upper()}; default ([^\]]+)\]", shown
    )
    assert about is not None
    assert about[1] == default_text(Settings.model_fields[name])


def test_the_usage_names_the_commands_own_flags_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--own", metavar="%")
    add_settings_flags(parser)
    assert "--own %" in parser.format_usage()
    assert "--port" not in parser.format_usage()


def test_a_limit_for_each_key_takes_a_number_of_requests_not_a_key() -> None:
    shown = _parser().format_help()
    assert "--max-requests-per-key REQUESTS" in shown
    assert "--max-videos-per-request VIDEOS" in shown


def test_a_secret_is_no_flag_since_others_can_read_a_command_line() -> None:
    assert "--api-keys" not in _parser().format_help()
    with pytest.raises(SystemExit):
        _parser().parse_args(["--api-keys", "x" * 20])


@pytest.mark.parametrize(
    ("name", "text"), [("access_log", "true"), ("upload_dir", "unset"), ("speculation", "auto"), ("port", "8000")]
)
def test_defaults_are_written_as_in_a_variable(name: str, text: str) -> None:
    assert default_text(Settings.model_fields[name]) == text


def test_flags_that_are_not_given_leave_the_defaults() -> None:
    assert settings_of(Settings, _parser().parse_args([])) == Settings()


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "vidspec.yaml"
    config.write_text("port: 1\nmax_frames: 2\nlog_format: json\naccess_log: true\n")
    monkeypatch.setenv("VIDSPEC_PORT", "3")
    monkeypatch.setenv("VIDSPEC_MAX_FRAMES", "4")
    args = _parser().parse_args(["--config", str(config), "--port", "5", "--no-access-log"])
    settings = settings_of(Settings, args)
    assert (settings.port, settings.max_frames, settings.log_format, settings.access_log) == (5, 4, "json", False)


def test_a_value_of_the_wrong_type_is_refused_under_the_name_of_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--keep-alive-s: "):
        settings_of(Settings, _parser().parse_args(["--keep-alive-s", "soon"]))
