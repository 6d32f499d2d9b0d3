"""The bounds that a pair must keep before its weights are shipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_QUESTION_MARGIN = 0.1
_QUESTION_CEILING = 0.95  # enough, however common the commonest answer is
_CAPTIONS_ALL_RIGHT = 0.5
_ACCEPTANCE_ALL = 0.92
_ACCEPTANCE_NONE = 0.78
_NEAR_SHARE = 0.25  # "near": within this share of what vision gains in all


@dataclass(frozen=True, slots=True)
class Gate:
    """One figure against its bound."""

    name: str
    value: float
    bound: float
    passed: bool


def gates(result: dict[str, Any]) -> list[Gate]:
    """Every gate, in the order of the result; bounds below are minima, except where the name says "at most"."""
    found = []
    for kind, row in result["questions"].items():
        bound = min(row["majority"] + _QUESTION_MARGIN, _QUESTION_CEILING)
        found.append(Gate(f"question {kind}", row["accuracy"], bound, row["accuracy"] >= bound))
    right = result["captions_all_right"]
    found.append(Gate("captions all right", right, _CAPTIONS_ALL_RIGHT, right >= _CAPTIONS_ALL_RIGHT))
    rates = result["acceptance"]
    slack = _NEAR_SHARE * (rates["all"] - rates["none"])
    found.append(Gate("acceptance all", rates["all"], _ACCEPTANCE_ALL, rates["all"] >= _ACCEPTANCE_ALL))
    found.append(Gate("acceptance none, at most", rates["none"], _ACCEPTANCE_NONE, rates["none"] <= _ACCEPTANCE_NONE))
    low, high = rates["none"] + slack, rates["all"] - slack
    found.append(Gate("acceptance background10, at most", rates["background10"], low, rates["background10"] <= low))
    found.append(Gate("acceptance objects10", rates["objects10"], high, rates["objects10"] >= high))
    return found
