"""Parsing of the command line, before any command runs."""

from __future__ import annotations

import argparse
import re

import pytest

from vidspec_service import __version__
from vidspec_service.cli.parsing import COMMANDS, UsageError, load_command, parse


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_has_a_module_that_explains_itself(name: str) -> None:
    command = load_command(name)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.__doc__
    assert callable(command.run)
    assert all(action.help for action in parser._actions)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(["--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +{summary}$", shown, re.MULTILINE) for name, summary in COMMANDS.items())


def test_help_of_bench_lists_every_bench(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(["bench", "--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert (f"  {name.removeprefix('bench ')} " in shown and summary in shown) is name.startswith("bench ")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_usage_of_a_command_names_its_own_flags_only(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*name.split(), "--help"])
    usage, about, *_ = capsys.readouterr().out.split("\n\n")
    assert "--max-upload-bytes" not in usage
    assert about.startswith(str(load_command(name).__doc__).splitlines()[0])


def test_version_is_the_packages_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--version"])
    assert capsys.readouterr().out == f"vidspec {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["srve"], "vidspec: unknown command srve; did you mean serve?"),
        (["frobnicate"], "vidspec: unknown command frobnicate (see"),
        ([], "vidspec: the following arguments are required: COMMAND"),
        (["bench"], "vidspec bench: the following arguments are required: COMMAND"),
        (["bench", "sped"], "vidspec: unknown command bench sped; did you mean bench speed?"),
        (["serve", "--prot", "1"], "vidspec serve: unknown flag --prot; did you mean --port?"),
        (["serve", "--no-acess-log"], "unknown flag --no-acess-log; did you mean --no-access-log?"),
        (["chat", "a.mp4", "hi", "--top_k=3"], "unknown flag --top_k; did you mean --top-k?"),
        (["chat", "a.mp4", "hi", "there"], "vidspec chat: unexpected argument there"),
        (["chat"], "vidspec chat: the following arguments are required: VIDEO"),
        (["serve", "--max-model-le", "9"], "unknown flag --max-model-le; did you mean --max-model-len?"),
        (["serve", "--max-num-batched-tokens", "9"], "the closest is --prefill-chunk"),
        (["serve", "--limit-mm-per-prompt", '{"video": 2}'], "see --max-videos-per-request"),
        (["chat", "a.mp4", "hi", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["serve", "--max-fram", "3"], "unknown flag --max-fram; did you mean --max-frames?"),
        (["serve", "--reload"], "unknown flag --reload (see"),  # not --upload-dir
        (["serve", "--target-model", "x"], "--target-model is not a flag here; name the target: --model"),
        (["serve", "--ssl-keyfile", "x"], "--ssl-keyfile is not a flag here; put a proxy"),  # not --api-key-file
        (["serve", "--disable-log-requests"], "see --no-access-log"),  # not --max-running-requests
    ],
)
def test_mistakes_are_named_with_a_suggestion(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(argv)
    assert message in str(error.value)
    assert str(error.value).endswith("--help)")


def test_arguments_reach_the_command() -> None:
    command, args = parse(["chat", "a.mp4", "What moves?", "--stop", "x", "--stop", "y", "--temperature", "0.5"])
    assert command is load_command("chat")
    assert (str(args.video), args.prompt, args.stop, args.temperature) == ("a.mp4", "What moves?", ["x", "y"], 0.5)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["render-clip", "clip.mp4", "--seed", "abc"], "--seed: must be an integer, not abc"),
        (["bench", "speed", "--prompts", "1.5"], "--prompts: must be an integer, not 1.5"),
        (["bench", "serve", "--rate", "often"], "--rate: must be a number, not often"),
        (["bench", "serve", "--rate", "inf"], "--rate: must be above 0, not inf"),
        (["chat", "clip.mp4", "What?", "--timeout-s", "-1"], "--timeout-s: must be above 0, not -1"),
    ],
)
def test_what_is_no_number_or_out_of_bounds_is_told_in_words(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse(argv)
