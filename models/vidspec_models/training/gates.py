"""The bounds that a pair must meet before its weights are shipped, and the tables of its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_QUESTION_MARGIN = 0.1
_QUESTION_CEILING = 0.95  # always enough, even if the commonest answer is so common that the margin goes beyond it
_CAPTIONS_ALL_RIGHT = 0.8
_DESCRIPTIONS_VALID = 0.98
_DESCRIPTIONS_ALL_RIGHT = 0.65
_PLAIN = 0.9
_GATED_KINDS = (  # of plain questions
    "colour", "count", "count_of", "motion", "letters", "presence", "moves", "rests", "changes", "is_size",
    "is_colour", "has_letter", "is_textured", "follow_up",
)  # fmt: skip
_UNKNOWN = 0.95
_ACCEPTANCE_ALL = 0.92
_ACCEPTANCE_NONE = 0.78
_NEAR_SHARE = 0.25  # "near" is within this share of the whole gain from vision


@dataclass(frozen=True, slots=True)
class Gate:
    """One figure against its bound."""

    name: str
    value: float
    bound: float
    passed: bool


def gates(result: dict[str, Any]) -> list[Gate]:
    """Every gate, in the order of the result."""
    rates = result["acceptance"]
    slack = _NEAR_SHARE * (rates["all"] - rates["none"])
    return [
        *(
            _at_least(f"question {kind}", row["accuracy"], min(row["majority"] + _QUESTION_MARGIN, _QUESTION_CEILING))
            for kind, row in result["questions"].items()
        ),
        *(
            _at_least(f"captions {how}", share, _CAPTIONS_ALL_RIGHT)
            for how, share in result["captions_all_right"].items()
        ),
        _at_least("descriptions valid", result["descriptions_valid"], _DESCRIPTIONS_VALID),
        _at_least("descriptions all right", result["descriptions_all_right"], _DESCRIPTIONS_ALL_RIGHT),
        *(
            _at_least(f"plain {kind}", row["accuracy"], _PLAIN)
            for kind, row in result["plain_questions"].items()
            if kind in _GATED_KINDS
        ),
        *(_at_least(f"unknown {name}", share, _UNKNOWN) for name, share in result["unknown"].items()),
        _at_least("acceptance all", rates["all"], _ACCEPTANCE_ALL),
        _at_most("acceptance none", rates["none"], _ACCEPTANCE_NONE),
        _at_most("acceptance background10", rates["background10"], rates["none"] + slack),
        _at_least("acceptance objects10", rates["objects10"], rates["all"] - slack),
    ]


def _at_least(name: str, value: float, bound: float) -> Gate:
    return Gate(name, value, bound, value >= bound)


def _at_most(name: str, value: float, bound: float) -> Gate:
    return Gate(f"{name}, at most", value, bound, value <= bound)


def format_table(result: dict[str, Any]) -> str:
    """The result as Markdown tables."""
    lines = ["| question | n | majority | target | draft |", "|---|---|---|---|---|"]
    for kind, row in result["questions"].items():
        draft = result["draft_questions"][kind]["accuracy"]
        lines.append(f"| {kind} | {row['n']} | {row['majority']:.2f} | {row['accuracy']:.2f} | {draft:.2f} |")
    lines += ["", "| captions | share right |", "|---|---|"]
    lines += [f"| everything, {how} | {share:.3f} |" for how, share in result["captions_all_right"].items()]
    lines += [f"| {name} | {value:.3f} |" for name, value in result["caption_facts"].items()]
    lines += ["", "| descriptions as JSON | share right |", "|---|---|"]
    lines += [f"| {name} | {result[f'descriptions_{name}']:.3f} |" for name in ("valid", "all_right")]
    lines += [f"| {name} | {value:.3f} |" for name, value in result["description_facts"].items()]
    lines += ["", "| plain question | n | majority | target |", "|---|---|---|---|"]
    for kind, row in result["plain_questions"].items():
        lines.append(f"| {kind} | {row['n']} | {row['majority']:.2f} | {row['accuracy']:.2f} |")
    lines += ["", "| says that it does not know | share |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in result["unknown"].items()]
    lines += ["", "| draft sees | acceptance |", "|---|---|"]
    lines += [f"| {view} | {value:.3f} |" for view, value in result["acceptance"].items()]
    lines += ["", "| gate | value | bound | passed |", "|---|---|---|---|"]
    lines += [f"| {g.name} | {g.value:.3f} | {g.bound:.3f} | {'yes' if g.passed else 'NO'} |" for g in gates(result)]
    return "\n".join(lines)
