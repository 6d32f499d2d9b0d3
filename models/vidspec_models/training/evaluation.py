"""Measures the pair on held-out test clips: questions, captions, acceptance; and whether it is good enough to ship.

Acceptance is how often the draft's choice is the target's, teacher-forced on the target's own captions, for several
views (subsets of the visual tokens). The views test the pair for leaks: background tokens must help hardly more than no
tokens at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from vidspec_models.bundled.captions import parse_caption, scene_facts
from vidspec_models.bundled.phrasings import instructions
from vidspec_models.bundled.plain_questions import PLAIN_KINDS, ask_plainly
from vidspec_models.bundled.questions import CAPTION_PROMPTS, questions
from vidspec_models.bundled.render import render_with_owners, slot_times
from vidspec_models.bundled.scene import TEST_SEEDS, Scene, sample_scene
from vidspec_models.training.architecture import NUM_VISUAL
from vidspec_models.training.examples import Example, find_cells
from vidspec_models.training.loaded_model import LoadedModel
from vidspec_models.training.plain_evaluation import (
    Answers,
    Marks,
    PlainEvaluation,
    add_marks,
    judge_replies,
    question_figures,
    shares,
)

VIEWS = ("all", "none", "random10", "uniform10", "background10", "objects10")
_KEPT = NUM_VISUAL // 10
_CLIPS_PER_BATCH = 8
_MAX_TOKENS = 160  # maximum length of a caption

# The bounds that a pair must meet before its weights are shipped.
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


def evaluate(
    target_dir: Path, draft_dir: Path, num_clips: int, device: str, dtype: str = "auto", draft_dtype: str = "auto"
) -> dict[str, Any]:
    """Figures on the first `num_clips` test clips, with both models as they are served; `format_table` names them."""
    target = LoadedModel(target_dir, dtype, device)
    draft = LoadedModel(draft_dir, draft_dtype, device)
    answers: Answers = defaultdict(list)
    drafted: Answers = defaultdict(list)
    captions = CaptionEvaluation(target)
    matches, num_tokens = Counter[str](), 0
    plain = PlainEvaluation(target)
    starts = range(0, num_clips, _CLIPS_PER_BATCH)
    for start in tqdm(starts, desc="evaluating", unit="batch"):
        seeds = TEST_SEEDS[start : min(start + _CLIPS_PER_BATCH, num_clips)]
        scenes = [sample_scene(seed) for seed in seeds]
        pixels = target.pixels(scenes)
        said = captions.add(scenes, pixels)
        matches += _matches(draft, scenes, said)
        num_tokens += sum(map(len, said))
        asked = [list(questions(scene)) for scene in scenes]
        judge_replies(target, target.features(pixels), asked, answers)
        judge_replies(draft, draft.features(pixels.to(draft.model.dtype)), asked, drafted)
        plain.add(scenes, pixels)
    return {
        "num_clips": num_clips,
        "target_dtype": target.dtype_name,
        "draft_dtype": draft.dtype_name,
        "questions": {kind: question_figures(found) for kind, found in answers.items()},
        "draft_questions": {kind: question_figures(found) for kind, found in drafted.items()},
        **captions.result(),
        **plain.result(),
        "acceptance": {view: matches[view] / max(num_tokens, 1) for view in VIEWS},
    }


class CaptionEvaluation:
    """Accumulates how many captions are right: asked for alone, after a question, and under a system message."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._facts: Marks = defaultdict(list)
        self._all_right: Marks = defaultdict(list)

    def add(self, scenes: list[Scene], pixels: torch.Tensor) -> list[list[int]]:
        """Ask for captions of the clips, which `pixels` show; returns those that were asked for alone, as token ids."""
        rng = np.random.default_rng([scenes[0].seed, 43])
        packer = self._model.packer
        asked, then = (packer.example(CAPTION_PROMPTS[0], "", follows=follows).prompt for follows in (False, True))
        told = " ".join(rng.choice(instructions(held_out=True), 2, replace=False))
        alone = self._model.generate(pixels, [asked] * len(scenes), _MAX_TOKENS)
        after = self._model.generate(pixels, [self._question(scene, rng) + then for scene in scenes], _MAX_TOKENS)
        under = self._model.generate(pixels, [asked] * len(scenes), _MAX_TOKENS, told)
        self._judge(scenes, alone, "alone", self._facts)
        self._judge(scenes, after, "after a question", defaultdict(list))
        self._judge(scenes, under, "under a system message", defaultdict(list))
        return alone

    def result(self) -> dict[str, Any]:
        """All figures so far, as `evaluate` reports them."""
        return {"captions_all_right": shares(self._all_right), "caption_facts": shares(self._facts)}

    def _question(self, scene: Scene, rng: np.random.Generator) -> list[int]:
        """A question and its true answer, as token ids."""
        asked = next(
            one for kind in rng.permutation(PLAIN_KINDS) if (one := ask_plainly(scene, kind, rng, held_out=True))
        )
        example = self._model.packer.example(asked.text, asked.reply)
        return example.prompt + example.answer

    def _judge(self, scenes: list[Scene], said: list[list[int]], how: str, facts: Marks) -> None:
        for scene, ids in zip(scenes, said, strict=True):
            text = self._model.processor.tokenizer.decode(ids, skip_special_tokens=True)
            self._all_right[how].append(judge_caption(scene, text, facts))


def _matches(draft: LoadedModel, scenes: list[Scene], answers: list[list[int]]) -> Counter[str]:
    """Per view, how often the draft chooses the target's token in the target's captions for `CAPTION_PROMPTS[0]`."""
    prompt = draft.packer.prompt_ids(CAPTION_PROMPTS[0])
    features = draft.features(draft.pixels(scenes))
    length = len(prompt) + max(map(len, answers))
    text = draft.packer.pack([[Example(prompt, answer)] for answer in answers], length).to(features.device)
    matches = Counter[str]()
    for view in VIEWS:
        visible = torch.from_numpy(np.stack([view_mask(scene, view) for scene in scenes])).to(features.device)
        matches[view] = int((draft.choices(features, text, visible) == text.labels).sum())
    return matches


def view_mask(scene: Scene, view: str) -> NDArray[np.bool_]:
    """Which of the 512 visual tokens the draft sees; random views are fixed by the scene's seed."""
    mask = np.zeros(NUM_VISUAL, np.bool_)
    if view == "all":
        return ~mask
    if view == "uniform10":
        mask[np.linspace(0, NUM_VISUAL - 1, _KEPT).round().astype(int)] = True
        return mask
    cells = find_cells(render_with_owners(scene, slot_times())[1])
    pool = {
        "none": np.zeros(0, np.int64),
        "random10": np.arange(NUM_VISUAL),
        "background10": np.flatnonzero(cells.is_strict_background),
        "objects10": np.flatnonzero(cells.owner),
    }[view]
    mask[np.random.default_rng([scene.seed, 23]).permutation(pool)[:_KEPT]] = True
    return mask


def judge_caption(scene: Scene, text: str, facts: Marks) -> bool:
    """Whether the whole caption is right; also adds a mark to `facts` for each fact that it states."""
    said = parse_caption(text)
    facts["parses"].append(said is not None)
    add_marks(scene, said, facts)
    return said == scene_facts(scene)


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
