"""Which answers were right: collected by the kind of question or fact, and what they come to."""

from __future__ import annotations

from collections import Counter

from vidspec_models.bundled.captions import Facts, fact_marks
from vidspec_models.bundled.scene import Scene

Marks = dict[str, list[bool]]
Answers = dict[str, list[tuple[str, bool]]]  # by type of question: the true answer, and whether it was given


def add_marks(scene: Scene, said: Facts | None, facts: Marks) -> None:
    """Add what is stated of the scene, rightly or not, by the name of the fact."""
    for name, is_right in fact_marks(scene, said):
        if is_right is not None:
            facts[name].append(is_right)


def shares(facts: Marks) -> dict[str, float]:
    """The share that is right."""
    return {name: sum(marks) / len(marks) for name, marks in facts.items()}


def question_figures(found: list[tuple[str, bool]]) -> dict[str, float]:
    """Accuracy, and how far one would come by always giving the commonest answer."""
    commonest = Counter(answer for answer, _ in found).most_common(1)[0][1]
    return {
        "accuracy": sum(right for _, right in found) / len(found),
        "majority": commonest / len(found),
        "n": len(found),
    }
