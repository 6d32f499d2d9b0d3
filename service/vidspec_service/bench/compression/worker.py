"""Child process of one configuration: answers about clips on the target alone and measures what that takes.

A process of its own because a process's peak memory never falls again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from vidspec_service.bench.child import serve
from vidspec_service.bench.compression.messages import Describe, Described, Load, Loaded, Question
from vidspec_service.bench.compression.scoring import Score

if TYPE_CHECKING:
    from vidspec_service.bench.compression.measuring import CompressedTarget


class _Target:
    def __init__(self) -> None:
        self._target: CompressedTarget | None = None

    def __call__(self, message: Load | Describe | Question, _: list[int]) -> Loaded | Described | Score:
        from vidspec_service.bench.compression.measuring import CompressedTarget

        if isinstance(message, Load):
            self._target = CompressedTarget(message)
            return self._target.loaded()
        assert self._target is not None
        return self._target.describe(message) if isinstance(message, Describe) else self._target.question(message)


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), msgspec.msgpack.Decoder(Load | Describe | Question), _Target()))
