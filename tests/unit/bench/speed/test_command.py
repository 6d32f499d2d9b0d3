"""`vidspec bench speed`: flags to options, and what is refused before anything is measured."""

from __future__ import annotations

import asyncio

import pytest

from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.speed.options import Mode, SpeedOptions, SpeedTask
from vidspec_service.bench.speed.run import compare
from vidspec_service.cli.parsing import parse
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.errors import ConfigError


def options(*flags: str) -> SpeedOptions:
    return options_from_args(SpeedOptions, parse(["bench", "speed", *flags])[1])


def test_without_flags_it_is_the_run_of_the_issue() -> None:
    assert options() == SpeedOptions()
    assert SpeedOptions().modes == (Mode.HF, Mode.OFF, Mode.SERIAL, Mode.PARALLEL, Mode.AUTO)


def test_flags_become_options_and_modes_keep_their_order() -> None:
    flags = "--prompts 3 --task qa --modes parallel off --temperature 0.8 --seed 5 --concurrency 8 --max-tokens 9"
    assert options(*flags.split()) == SpeedOptions(
        num_prompts=3,
        task=SpeedTask.QA,
        modes=(Mode.OFF, Mode.PARALLEL),
        max_tokens=9,
        temperature=0.8,
        seed=5,
        concurrency=8,
    )
    assert options("--task", "mixed").task is SpeedTask.MIXED


def test_speculating_modes_need_a_draft() -> None:
    config = EngineConfig(target=WorkerConfig(model="bundled"))
    with pytest.raises(ConfigError, match="--draft-model"):
        asyncio.run(compare(SpeedOptions(), config, lambda *_: None))
