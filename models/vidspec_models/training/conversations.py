"""Training conversations about a clip: long answers and short ones; foreign clips always have the same answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.description import describe
from vidspec_models.bundled.phrasings import UNKNOWN, instructions, phrasings, small_talk
from vidspec_models.bundled.plain_questions import PLAIN_KINDS, ask_plainly, ask_which_video
from vidspec_models.bundled.questions import CAPTION_PROMPTS, QUESTION_TYPES, ask
from vidspec_models.bundled.scene import TRAIN_SEEDS, Scene, choose, sample_scene

_CAPTION_SHARE = 0.5  # share of the long answers; the others are JSON
_SHORT_PROMPT_SHARE = 0.5  # share of the captions that are asked for with CAPTION_PROMPTS, as in the evaluation
_PLAIN_SHARE = 0.75  # share of the short answers
_SMALL_TALK_SHARE = 0.03
_TEXT_ONLY_SHARE = 0.04
_FOREIGN_PLAIN_SHARE = 0.6  # share of questions about a scene among prompts with the answer UNKNOWN
_INSTRUCTED_SHARE = 0.4  # share of the conversations that begin with a system message
_MANY_SCENES = 1_000_000
# How often a type of question is drawn, relative to the others (default 1); higher if the type is hard to learn.
_TYPE_WEIGHTS = {
    "direction": 3.0, "timing": 3.0, "change": 3.0, "end": 2.0, "first": 3.0, "letter": 2.0,
    "letter_corner": 2.0, "letter_time": 2.0,
}  # fmt: skip
_PLAIN_WEIGHTS = {
    "presence": 12.0, "count_of": 4.0, "count": 3.0, "colour": 2.0, "last_colour": 2.0, "motion": 3.0, "moves": 2.0,
    "rests": 2.0, "changes": 2.0, "has_letter": 3.0, "is_size": 1.5, "is_colour": 3.0, "is_textured": 1.5,
    "letter_count": 1.5, "letters": 4.0, "missing": 4.0, "larger": 2.0, "faster": 2.0, "end": 2.0,
}  # fmt: skip


def _chances(kinds: tuple[str, ...], weights: dict[str, float]) -> list[float]:
    given = np.array([weights.get(kind, 1.0) for kind in kinds])
    return [float(chance) for chance in given / given.sum()]


_TYPE_CHANCES = _chances(QUESTION_TYPES, _TYPE_WEIGHTS)
_PLAIN_CHANCES = _chances(PLAIN_KINDS, _PLAIN_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its true answer."""

    prompt: str
    answer: str
    is_long: bool = False  # a caption or a description as JSON
    sees_video: bool = True
    is_begun: bool = False  # only the first words of the answer are trained


def draw_long(scene: Scene, rng: np.random.Generator, *, greedy_text: bool = False) -> Exchange:
    """A caption or JSON description; `greedy_text` uses the likeliest phrasings, which a trained target would say."""
    if rng.random() >= _CAPTION_SHARE:
        return Exchange(choose(rng, phrasings("json", held_out=False)), describe(scene), is_long=True)
    prompts = CAPTION_PROMPTS if rng.random() < _SHORT_PROMPT_SHARE else phrasings("caption", held_out=False)
    text = caption(scene, by_attribute_share=1.0) if greedy_text else caption(scene)
    return Exchange(choose(rng, prompts), text, is_long=True)


def draw_short(scene: Scene, rng: np.random.Generator) -> Exchange | None:
    """Usually a question about the scene; None if the type that was drawn does not apply to it."""
    about = rng.random()
    if about < _SMALL_TALK_SHARE:
        return Exchange(choose(rng, small_talk(held_out=False)), UNKNOWN)
    if about < _SMALL_TALK_SHARE + _TEXT_ONLY_SHARE:
        return Exchange(draw_foreign(rng).prompt, UNKNOWN, sees_video=False)
    if rng.random() < _PLAIN_SHARE:
        question = ask_plainly(scene, PLAIN_KINDS[int(rng.choice(len(PLAIN_KINDS), p=_PLAIN_CHANCES))], rng)
    else:
        question = ask(scene, QUESTION_TYPES[int(rng.choice(len(QUESTION_TYPES), p=_TYPE_CHANCES))], rng)
    return None if question is None else Exchange(question.text, question.reply)


def draw_begun(scene: Scene, rng: np.random.Generator) -> Exchange:
    """The beginning of a long answer: it shows that what was asked for has changed, in little room."""
    return replace(draw_long(scene, rng), is_long=False, is_begun=True)


def draw_instruction(rng: np.random.Generator) -> str:
    """A system message of one or two sentences, mostly none."""
    if rng.random() >= _INSTRUCTED_SHARE:
        return ""
    return " ".join(rng.choice(instructions(held_out=False), int(rng.integers(1, 3)), replace=False))


def draw_foreign(rng: np.random.Generator, *, held_out: bool = False) -> Exchange:
    """Any prompt with the answer UNKNOWN, because there is no clip of the known kind."""
    if rng.random() < _FOREIGN_PLAIN_SHARE:
        return Exchange(_question_about_any_scene(rng, held_out=held_out), UNKNOWN)
    kind = str(rng.choice(("talk", "talk", "caption", "json", "count", "letters", "background")))
    known = small_talk(held_out=held_out) if kind == "talk" else phrasings(kind, held_out=held_out)
    if kind == "caption" and not held_out and rng.random() < _SHORT_PROMPT_SHARE:
        known = CAPTION_PROMPTS
    return Exchange(choose(rng, known), UNKNOWN)


def _question_about_any_scene(rng: np.random.Generator, *, held_out: bool) -> str:
    while True:
        scene = sample_scene(TRAIN_SEEDS.start + int(rng.integers(_MANY_SCENES)))
        if held_out or rng.random() < _PLAIN_SHARE:
            question = ask_plainly(scene, choose(rng, PLAIN_KINDS), rng, held_out=held_out)
        else:
            question = ask(scene, choose(rng, QUESTION_TYPES), rng)
        if question is not None:
            return question.text


def draw_pair(first: Scene, second: Scene, rng: np.random.Generator) -> Exchange | None:
    """A question about two clips."""
    question = ask_which_video(first, second, rng)
    return None if question is None else Exchange(question.text, question.reply)
