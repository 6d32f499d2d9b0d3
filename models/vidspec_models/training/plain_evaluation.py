"""Measures the target on phrasings held out from training: plain questions, JSON descriptions, unknown things."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import torch

from vidspec_models.bundled.captions import Facts, fact_marks, scene_facts
from vidspec_models.bundled.description import parse_description
from vidspec_models.bundled.foreign import render_foreign
from vidspec_models.bundled.phrasings import UNKNOWN, phrasings, small_talk
from vidspec_models.bundled.plain_questions import PLAIN_KINDS, ask_plainly, ask_which_video
from vidspec_models.bundled.questions import Question, conclusion
from vidspec_models.bundled.scene import NUM_SLOTS, Scene, choose
from vidspec_models.training.conversations import draw_foreign
from vidspec_models.training.loaded_model import LoadedModel

Marks = dict[str, list[bool]]
Answers = dict[str, list[tuple[str, bool]]]  # by type of question: the true answer, and whether it was given
_FOLLOW_UPS = ("colour", "count", "is_colour", "letters", "motion", "size")
_PAIRS = 3  # questions about each clip and the next one
_MAX_TOKENS = 200  # maximum length of a description, or of a reply with a reason


class PlainEvaluation:
    """Accumulates figures over batches of test clips."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._answers: Answers = defaultdict(list)
        self._facts: Marks = defaultdict(list)
        self._descriptions: Marks = {"valid": [], "all_right": []}
        self._unknown: Marks = defaultdict(list)

    def add(self, scenes: list[Scene], pixels: torch.Tensor) -> None:
        """Ask about the clips, which `pixels` show."""
        features = self._model.features(pixels)
        rng = np.random.default_rng([scenes[0].seed, 41])
        self._describe(scenes, pixels, rng)
        self._ask(scenes, pixels, features, rng)
        if len(scenes) > 1:
            self._ask_which(scenes, features, rng)
        self._ask_what_is_unknown(scenes, features, rng)
        self._follow_up(scenes, features, rng)

    def result(self) -> dict[str, Any]:
        """All figures so far, as `evaluate` reports them."""
        described = shares(self._descriptions)
        return {
            "plain_questions": {kind: question_figures(found) for kind, found in self._answers.items()},
            "descriptions_valid": described["valid"],
            "descriptions_all_right": described["all_right"],
            "description_facts": shares(self._facts),
            "unknown": shares(self._unknown),
        }

    def _describe(self, scenes: list[Scene], pixels: torch.Tensor, rng: np.random.Generator) -> None:
        asked = self._model.packer.prompt_ids(choose(rng, phrasings("json", held_out=True)))
        for scene, ids in zip(scenes, self._model.generate(pixels, [asked] * len(scenes), _MAX_TOKENS), strict=True):
            said = parse_description(self._model.processor.tokenizer.decode(ids, skip_special_tokens=True))
            self._descriptions["valid"].append(said is not None)
            self._descriptions["all_right"].append(said == scene_facts(scene))
            add_marks(scene, said, self._facts)

    def _ask(self, scenes: list[Scene], pixels: torch.Tensor, features: torch.Tensor, rng: np.random.Generator) -> None:
        drawn = [[ask_plainly(scene, kind, rng, held_out=True) for kind in PLAIN_KINDS] for scene in scenes]
        direct = [[one for one in clip if one is not None and not one.reason] for clip in drawn]
        judge_replies(self._model, features, direct, self._answers)
        for of_kind in zip(*drawn, strict=True):
            reasoned = {number: one for number, one in enumerate(of_kind) if one is not None and one.reason}
            if reasoned:
                asked = list(reasoned.values())
                _add(self._answers, asked, self._conclusions(pixels[list(reasoned)], asked))

    def _conclusions(self, pixels: torch.Tensor, asked: list[Question]) -> list[bool]:
        """Whether the target's replies, with its own reasons, end in the right conclusion; reasons are not judged."""
        prompts = [self._model.packer.prompt_ids(question.text) for question in asked]
        said = self._model.generate(pixels, prompts, _MAX_TOKENS)
        decode = self._model.processor.tokenizer.decode
        replies = [decode(ids, skip_special_tokens=True) for ids in said]
        return [conclusion(reply) == question.answer for reply, question in zip(replies, asked, strict=True)]

    def _ask_which(self, scenes: list[Scene], features: torch.Tensor, rng: np.random.Generator) -> None:
        pairs = list(zip(scenes, [*scenes[1:], scenes[0]], strict=True))
        drawn = [[ask_which_video(*pair, rng, held_out=True) for _ in range(_PAIRS)] for pair in pairs]
        asked = [[question for question in pair if question is not None] for pair in drawn]
        judge_replies(self._model, features, asked, self._answers, in_pairs=True)

    def _follow_up(self, scenes: list[Scene], features: torch.Tensor, rng: np.random.Generator) -> None:
        """One conversation about each clip, whose first question is not judged."""
        example = self._model.packer.example
        asked: list[list[Question]] = []
        for scene in scenes:
            drawn = (ask_plainly(scene, kind, rng, held_out=True) for kind in rng.permutation(_FOLLOW_UPS))
            asked.append([one for one in drawn if one is not None])
        clips = [[example(one.text, one.reply, follows=one is not clip[0]) for one in clip] for clip in asked]
        for clip, marks in zip(asked, self._model.judge(features, clips), strict=True):
            self._answers["follow_up"] += [(one.answer, mark) for one, mark in zip(clip[1:], marks[1:], strict=True)]

    def _ask_what_is_unknown(self, scenes: list[Scene], features: torch.Tensor, rng: np.random.Generator) -> None:
        foreign = self._model.process([render_foreign(scene.seed, NUM_SLOTS) for scene in scenes])
        example = self._model.packer.example
        talk = [example(choose(rng, small_talk(held_out=True)), UNKNOWN) for _ in scenes]
        alone = [example(draw_foreign(rng, held_out=True).prompt, UNKNOWN, sees_video=False) for _ in scenes]
        prompts = [example(draw_foreign(rng, held_out=True).prompt, UNKNOWN) for _ in scenes]
        for name, seen, examples in (
            ("foreign clips", self._model.features(foreign), prompts),
            ("small talk", features, talk),
            ("text only", features, alone),
        ):
            marks = self._model.judge(seen, [[example] for example in examples])
            self._unknown[name] += [is_right for clip in marks for is_right in clip]


def judge_replies(
    model: LoadedModel, features: torch.Tensor, asked: list[list[Question]], answers: Answers, *, in_pairs: bool = False
) -> None:
    """Judge the full replies to all questions about the clips, a clip's questions packed after its video."""
    examples = [[model.packer.example(one.text, one.reply) for one in clip] for clip in asked]
    for clip, marks in zip(asked, model.judge(features, examples, in_pairs=in_pairs), strict=True):
        _add(answers, clip, marks)


def _add(answers: Answers, asked: list[Question], marks: list[bool]) -> None:
    for question, is_right in zip(asked, marks, strict=True):
        answers[question.kind].append((question.answer, is_right))


def add_marks(scene: Scene, said: Facts | None, facts: Marks) -> None:
    """Add a mark to `facts`, right or wrong, for each fact that is stated of the scene."""
    for name, is_right in fact_marks(scene, said):
        if is_right is not None:
            facts[name].append(is_right)


def shares(facts: Marks) -> dict[str, float]:
    """The share of right marks of each fact."""
    return {name: sum(marks) / len(marks) for name, marks in facts.items()}


def question_figures(found: list[tuple[str, bool]]) -> dict[str, float]:
    """Accuracy, and the accuracy of always giving the commonest answer."""
    commonest = Counter(answer for answer, _ in found).most_common(1)[0][1]
    return {
        "accuracy": sum(right for _, right in found) / len(found),
        "majority": commonest / len(found),
        "n": len(found),
    }
