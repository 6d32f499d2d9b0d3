"""Measures the pair on held-out test clips: questions, captions, acceptance. The target runs as it ships, in bf16.

Acceptance is how often the draft's choice is the target's, teacher-forced on the target's own captions, under several
views. They are the leak test of the pair: background tokens must help (almost) as little as no tokens at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from vidspec_models.bundled.captions import caption_marks, parse_caption, scene_facts
from vidspec_models.bundled.questions import CAPTION_PROMPTS, questions
from vidspec_models.bundled.render import render, render_with_owners, slot_times
from vidspec_models.bundled.scene import TEST_SEEDS, Scene, sample_scene
from vidspec_models.training.architecture import CELLS, NUM_VISUAL, register_attention
from vidspec_models.training.examples import IGNORE, Example, ExamplePacker, PackedText, find_cells
from vidspec_models.training.forward import Learner, PackedForward
from vidspec_models.training.gates import Gate, format_table, gates
from vidspec_models.training.tokenizer import VIDEO
from vidspec_models.training.tower import tower_features

__all__ = ["Gate", "evaluate", "format_table", "gates"]

VIEWS = ("all", "none", "random10", "uniform10", "background10", "objects10")
_KEPT = NUM_VISUAL // 10
_CLIPS_PER_BATCH = 8
Marks = dict[str, list[bool]]
Answers = dict[str, list[tuple[str, bool]]]  # by type of question: the true answer, and whether it was given


def evaluate(target_dir: Path, draft_dir: Path, num_clips: int, device: str) -> dict[str, Any]:
    """Figures on the first `num_clips` test clips; `format_table` names each."""
    target = LoadedModel(target_dir, torch.bfloat16, device)
    draft = LoadedModel(draft_dir, torch.float32, device)
    answers: Answers = defaultdict(list)
    drafted: Answers = defaultdict(list)
    facts: Marks = defaultdict(list)
    num_right, matches, num_tokens = 0, Counter[str](), 0
    starts = range(0, num_clips, _CLIPS_PER_BATCH)
    for start in tqdm(starts, desc="evaluating", unit="batch"):
        seeds = TEST_SEEDS[start : min(start + _CLIPS_PER_BATCH, num_clips)]
        scenes = [sample_scene(seed) for seed in seeds]
        pixels = target.pixels(scenes)
        said = target.generate(pixels, CAPTION_PROMPTS[0])
        for scene, ids in zip(scenes, said, strict=True):
            num_right += judge_caption(scene, target.processor.tokenizer.decode(ids, skip_special_tokens=True), facts)
        matches += _matches(draft, scenes, said)
        num_tokens += sum(map(len, said))
        _answer(target, scenes, pixels, answers)
        _answer(draft, scenes, pixels.float(), drafted)
    return {
        "num_clips": num_clips,
        "target_dtype": "bfloat16",
        "questions": {kind: _question_figures(found) for kind, found in answers.items()},
        "draft_questions": {kind: _question_figures(found) for kind, found in drafted.items()},
        "captions_all_right": num_right / max(num_clips, 1),
        "caption_facts": {name: sum(marks) / len(marks) for name, marks in facts.items()},
        "acceptance": {view: matches[view] / max(num_tokens, 1) for view in VIEWS},
    }


def _answer(model: LoadedModel, scenes: list[Scene], pixels: torch.Tensor, found: Answers) -> None:
    """All questions of the clips, packed behind one video; right means the word and the end token are the argmax.

    That equals greedy decoding, because a wrong first token is wrong either way.
    """
    asked = [questions(scene) for scene in scenes]
    examples = [[model.packer.example(one.text, one.answer) for one in clip] for clip in asked]
    text = model.packer.pack(examples, max(sum(map(len, clip)) for clip in examples)).to(pixels.device)
    is_right = text.labels == model.choices(model.features(pixels), text)
    is_answer = text.labels != IGNORE
    for row, clip in enumerate(asked):
        for segment, question in enumerate(clip, 1):
            at = is_answer[row] & (text.segments[row] == segment)
            found[question.kind].append((question.answer, bool(is_right[row][at].all())))


def _question_figures(found: list[tuple[str, bool]]) -> dict[str, float]:
    commonest = Counter(answer for answer, _ in found).most_common(1)[0][1]
    return {
        "accuracy": sum(right for _, right in found) / len(found),
        "majority": commonest / len(found),
        "n": len(found),
    }


class LoadedModel:
    """One model of the pair on one device, from stock `from_pretrained`; all its answers come from stock modules."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.packer = ExamplePacker(self.processor.tokenizer)
        self._forward = PackedForward(self.packer.prefix, device, compile_layers=False)

    def pixels(self, scenes: list[Scene]) -> torch.Tensor:
        """Processed canonical frames [C, 8, 3, 128, 128]."""
        videos = [torch.from_numpy(render(scene, slot_times())).permute(0, 3, 1, 2) for scene in scenes]
        batch = self.processor.video_processor(videos=videos, return_tensors="pt", do_sample_frames=False)
        pixels: torch.Tensor = batch["pixel_values_videos"]
        return pixels.to(self.model.device, self.model.dtype)

    @torch.no_grad()
    def generate(self, pixels: torch.Tensor, prompt: str, max_new_tokens: int = 160) -> list[list[int]]:
        """Greedy answers of stock `generate`, as token ids with the end token."""
        video = self.processor.tokenizer.convert_tokens_to_ids(VIDEO)
        tokens = pixels.shape[1] * CELLS + 1
        ids = [*self.packer.prefix, *[video] * tokens, *self.packer.prompt_ids(prompt)]
        inputs = torch.tensor([ids] * len(pixels), device=pixels.device)
        output = self.model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), pixel_values_videos=pixels,
            do_sample=False, max_new_tokens=max_new_tokens,
        )  # fmt: skip
        end = self.processor.tokenizer.eos_token_id
        answers = [row[len(ids) :].tolist() for row in output]
        return [row[: row.index(end) + 1] if end in row else row for row in answers]

    @torch.no_grad()
    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Tower features of all frames [C * T, 256, W]."""
        return tower_features(self.model.model.vision_tower, pixels.flatten(0, 1))

    @torch.no_grad()
    def choices(self, features: torch.Tensor, text: PackedText, visible: torch.Tensor | None = None) -> torch.Tensor:
        """The likeliest next tokens [C, L] of packed text, with all or only some visual tokens [C, 512] visible."""
        learner = Learner(self.model).to(features.device)
        learner.lm.set_attn_implementation(register_attention())
        keep = torch.arange(NUM_VISUAL, device=features.device).expand(len(text.ids), -1)
        logits, _ = self._forward(learner, features, keep, text, visible)
        learner.lm.set_attn_implementation("sdpa")
        return logits.argmax(-1)


def _matches(draft: LoadedModel, scenes: list[Scene], answers: list[list[int]]) -> Counter[str]:
    """Per view, how often the draft chooses the target's token in its greedy captions for `CAPTION_PROMPTS[0]`."""
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
    """Whether all of it is right; adds to the marks of what it states, by the name of the fact."""
    said = parse_caption(text)
    facts["parses"].append(said is not None)
    for name, is_right in caption_marks(scene, text):
        if is_right is not None:
            facts[name].append(is_right)
    return said == scene_facts(scene)
