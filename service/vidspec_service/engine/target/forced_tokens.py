"""Which committed tokens a grammar left no choice about: for requests that ask who wrote what."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from vidspec_models.grammar import GrammarMask
from vidspec_service.engine.ipc.messages import Tokens


def with_forced(tokens: Tokens, grammar: GrammarMask, committed: Sequence[int]) -> Tokens:
    """The message with the places of its ids, which end `committed`, that follow from the grammar alone.

    A function of grammar and answer, whatever was proposed: the same in every mode.
    """
    first = at = len(committed) - len(tokens.ids)
    forced: list[int] = []
    while at < len(committed):
        certain = grammar.forced(committed[:at])
        num_forced = next(
            (place for place, (said, must) in enumerate(zip(committed[at:], certain, strict=False)) if said != must),
            min(len(certain), len(committed) - at),
        )
        forced += range(at - first, at - first + num_forced)
        at += max(num_forced, 1)
    return replace(tokens, forced=tuple(forced))
