"""Measures the pair on held-out test clips: questions, captions, acceptance. The target runs as it ships, in bf16."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from .acceptance import AcceptanceCounter
from .architecture import VIDEO_TOKENS
from .caption_score import CaptionScore
from .gates import Gate, gates
from .loaded_pair import NUM_VISUAL, LoadedModel
from .questions import CAPTION_PROMPTS, Question, questions
from .scene import TEST_SEEDS, Scene, sample_scene

__all__ = ["Gate", "evaluate", "format_table", "gates"]

_CLIPS_PER_BATCH = 8


def evaluate(
    target_dir: Path, draft_dir: Path, num_clips: int = 200, device: str = "cpu", progress: bool = True,
    target_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """Figures on the first `num_clips` test clips; see the module's name for each key in `format_table`."""
    target = LoadedModel(Path(target_dir), target_dtype, device)
    draft = LoadedModel(Path(draft_dir), torch.float32, device)
    answers: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    drafted: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    captions, acceptance = CaptionScore(), AcceptanceCounter(draft)
    starts = range(0, num_clips, _CLIPS_PER_BATCH)
    for start in tqdm(starts, desc="evaluating", unit="batch", disable=not progress):
        seeds = TEST_SEEDS[start : min(start + _CLIPS_PER_BATCH, num_clips)]
        scenes = [sample_scene(seed) for seed in seeds]
        pixels = target.pixels(scenes)
        said = target.generate(pixels, CAPTION_PROMPTS[0])
        for scene, ids in zip(scenes, said, strict=True):
            captions.add(scene, target.processor.tokenizer.decode(ids, skip_special_tokens=True))
        acceptance.add(scenes, said)
        _answer(target, scenes, pixels, answers)
        _answer(draft, scenes, pixels.float(), drafted)
    return {
        "num_clips": num_clips,
        "target_dtype": str(target_dtype).removeprefix("torch."),
        "questions": {kind: _question_figures(found) for kind, found in answers.items()},
        "draft_questions": {kind: _question_figures(found) for kind, found in drafted.items()},
        "captions_all_right": captions.all_right,
        "caption_facts": captions.fact_rates(),
        "acceptance": acceptance.rates(),
    }


def _answer(
    model: LoadedModel, scenes: list[Scene], pixels: torch.Tensor, found: dict[str, list[tuple[str, bool]]]
) -> None:
    """All questions of the clips, packed behind one video; right means the word and the end token are the argmax.

    That equals greedy decoding, because a wrong first token is wrong either way.
    """
    asked = [questions(scene) for scene in scenes]
    turns = [[_turn(model, question) for question in clip] for clip in asked]
    length = max(sum(len(prompt) + len(answer) for prompt, answer in clip) for clip in turns)
    ids = np.zeros((len(scenes), length), np.int64)
    positions = np.zeros_like(ids)
    segments = np.full_like(ids, -1)
    spans: list[list[tuple[int, list[int]]]] = []
    for row, clip in enumerate(turns):
        at, ends = 0, []
        for number, (prompt, answer) in enumerate(clip):
            end = at + len(prompt) + len(answer)
            ids[row, at:end] = prompt + answer
            positions[row, at:end] = len(model.packer.prefix) + VIDEO_TOKENS + np.arange(end - at)
            segments[row, at:end] = number + 1
            ends.append((at + len(prompt) - 1, answer))
            at = end
        spans.append(ends)
    device = pixels.device
    text = tuple(torch.from_numpy(values).to(device) for values in (ids, positions, segments))
    visible = torch.ones(len(scenes), NUM_VISUAL, dtype=torch.bool, device=device)
    chosen = model.packed_logits(model.features(pixels), (text[0], text[1], text[2]), visible).argmax(-1).tolist()
    for row, wanted in enumerate(asked):
        for question, (at, answer) in zip(wanted, spans[row], strict=True):
            found[question.kind].append((question.answer, chosen[row][at : at + len(answer)] == answer))


def _turn(model: LoadedModel, question: Question) -> tuple[list[int], list[int]]:
    end: int = model.processor.tokenizer.eos_token_id
    return model.packer.prompt_ids(question.text), [*model.packer.encode(question.answer), end]


def _question_figures(found: list[tuple[str, bool]]) -> dict[str, float]:
    commonest = Counter(answer for answer, _ in found).most_common(1)[0][1]
    return {
        "accuracy": sum(right for _, right in found) / len(found),
        "majority": commonest / len(found),
        "n": len(found),
    }


def format_table(result: dict[str, Any]) -> str:
    """The result as Markdown tables."""
    lines = ["| question | n | majority | target | draft |", "|---|---|---|---|---|"]
    for kind, row in result["questions"].items():
        draft = result["draft_questions"][kind]["accuracy"]
        lines.append(f"| {kind} | {row['n']} | {row['majority']:.2f} | {row['accuracy']:.2f} | {draft:.2f} |")
    lines += ["", "| captions | share right |", "|---|---|", f"| everything | {result['captions_all_right']:.3f} |"]
    lines += [f"| {name} | {value:.3f} |" for name, value in result["caption_facts"].items()]
    lines += ["", "| draft sees | acceptance |", "|---|---|"]
    lines += [f"| {view} | {value:.3f} |" for view, value in result["acceptance"].items()]
    lines += ["", "| gate | value | bound | passed |", "|---|---|---|---|"]
    lines += [f"| {g.name} | {g.value:.3f} | {g.bound:.3f} | {'yes' if g.passed else 'NO'} |" for g in gates(result)]
    return "\n".join(lines)
