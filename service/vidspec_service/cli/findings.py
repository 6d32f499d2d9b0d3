"""What `vidspec check` finds: rows of a plain table as they come, or one JSON object at the end; and what is wrong."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from vidspec_service.cli.terminal import say


class Findings:
    """A fact is told under a short name, in words and, where they differ, as what goes into the JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._facts: dict[str, dict[str, Any]] = {}
        self._section = "service"
        self._good: list[str] = []
        self._problems: list[str] = []

    def begin(self, section: str) -> None:
        """What is told from here on stands under this name in the JSON."""
        self._section = section

    def tell(self, name: str, text: str, fact: object = None) -> None:
        """One row; `fact` is dataclasses, numbers, lists and dicts of these."""
        facts = self._facts.setdefault(self._section, {})
        facts[name] = text if fact is None else msgspec.to_builtins(fact, str_keys=True)
        if not self._as_json:
            say(f"{name:<12}{text}")

    def praise(self, text: str) -> None:
        """Something that works, for the verdict."""
        self._good.append(text)

    def problem(self, text: str) -> None:
        """Something that does not, and what to do about it: the check fails."""
        if text not in self._problems:
            self._problems.append(text)

    def end(self) -> int:
        """Tell the verdict; returns the exit code."""
        if self._as_json:
            whole = {**self._facts, "problems": self._problems, "verdict": self._good}
            say(json.dumps(whole, indent=2, ensure_ascii=False))
        else:
            self.tell("verdict", "; ".join([*self._problems, *self._good]))
        return 1 if self._problems else 0
