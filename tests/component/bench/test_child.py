"""Objects in child processes: they answer, refuse with a message, and their death is reported."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tqdm import tqdm

from vidspec_models.errors import ModelLoadError
from vidspec_service.bench.common.child import Child, call_in_child
from vidspec_service.errors import ConfigError


class Adder:
    def __init__(self, start: int) -> None:
        if start < 0:
            raise ModelLoadError("a start below zero")
        self.total = start

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def same(self, number: int) -> int:
        return number

    def die(self) -> None:
        os._exit(1)

    def refuse(self) -> None:
        raise ModelLoadError("no such sum")


def count_with_a_bar() -> int:
    return sum(tqdm(range(3), disable=False, file=sys.stdout))


def test_an_object_keeps_its_state_in_another_process() -> None:
    with Child(Adder, 40) as child:
        assert [child.call(Adder.add, 1), child.call(Adder.add, 1)] == [41, 42]
    assert call_in_child(os.getpid) != os.getpid()


def test_calls_of_several_threads_take_turns_and_each_gets_its_own_answer() -> None:
    with Child(Adder, 0) as child, ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda number: child.call(Adder.same, number), range(200))
        assert list(answers) == list(range(200))


def test_a_model_error_is_told_in_its_own_words() -> None:
    with pytest.raises(ConfigError, match="a start below zero"):
        Child(Adder, -1)
    with Child(Adder, 0) as child, pytest.raises(ConfigError, match="no such sum"):
        child.call(Adder.refuse)


def test_a_death_is_told() -> None:
    with Child(Adder, 0) as child:
        with pytest.raises(ConfigError, match="Adder ended unexpectedly"):
            child.call(Adder.die)
        with pytest.raises(ConfigError, match="Adder ended unexpectedly"):
            child.call(Adder.add, 1)


def test_an_interrupted_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C while the child loads its model."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Child, "_reply", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Child(Adder, 0)
    assert multiprocessing.active_children() == []


def test_a_child_that_showed_a_progress_bar_leaves_no_semaphore() -> None:
    script = f"""
from {__name__} import count_with_a_bar
from vidspec_service.bench.common.child import call_in_child
assert call_in_child(count_with_a_bar) == 3
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""
