"""Measures the pair on held-out test clips: questions, captions, acceptance.

Acceptance is how often the draft's choice is the target's, teacher-forced on the target's own captions, for several
views (subsets of the visual tokens). The views test the pair for leaks: background tokens must help hardly more than no
tokens at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from vidspec_models.bundled.captions import parse_caption, scene_facts
from vidspec_models.bundled.questions import CAPTION_PROMPTS, questions
from vidspec_models.bundled.render import render_with_owners, slot_times
from vidspec_models.bundled.scene import TEST_SEEDS, Scene, sample_scene
from vidspec_models.training.architecture import NUM_VISUAL
from vidspec_models.training.examples import Example, find_cells
from vidspec_models.training.gates import Gate, format_table, gates
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

__all__ = ["Gate", "evaluate", "format_table", "gates"]

VIEWS = ("all", "none", "random10", "uniform10", "background10", "objects10")
_KEPT = NUM_VISUAL // 10
_CLIPS_PER_BATCH = 8
_MAX_TOKENS = 160  # maximum length of a caption


def evaluate(
    target_dir: Path, draft_dir: Path, num_clips: int, device: str, dtype: str = "auto", draft_dtype: str = "auto"
) -> dict[str, Any]:
    """Figures on the first `num_clips` test clips, with both models as they are served; `format_table` names them."""
    target = LoadedModel(target_dir, dtype, device)
    draft = LoadedModel(draft_dir, draft_dtype, device)
    answers: Answers = defaultdict(list)
    drafted: Answers = defaultdict(list)
    facts: Marks = defaultdict(list)
    num_right, matches, num_tokens = 0, Counter[str](), 0
    plain = PlainEvaluation(target)
    starts = range(0, num_clips, _CLIPS_PER_BATCH)
    for start in tqdm(starts, desc="evaluating", unit="batch"):
        seeds = TEST_SEEDS[start : min(start + _CLIPS_PER_BATCH, num_clips)]
        scenes = [sample_scene(seed) for seed in seeds]
        pixels = target.pixels(scenes)
        said = target.generate(pixels, CAPTION_PROMPTS[:1] * len(scenes), _MAX_TOKENS)
        for scene, ids in zip(scenes, said, strict=True):
            num_right += judge_caption(scene, target.processor.tokenizer.decode(ids, skip_special_tokens=True), facts)
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
        "captions_all_right": num_right / max(num_clips, 1),
        "caption_facts": shares(facts),
        **plain.result(),
        "acceptance": {view: matches[view] / max(num_tokens, 1) for view in VIEWS},
    }


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
