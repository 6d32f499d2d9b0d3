"""Stage C: the draft alone, drawn to the frozen target's distribution on the text that the target is likely to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from .architecture import DRAFT_SIZE, TARGET_SIZE, TextSize
from .clip_batch import make_clip_batch
from .dropping import choose_tokens, draft_visibility
from .joint_stage import NUM_VISUAL, FrozenTower, PairForward, build_learner
from .lm_forward import Learner
from .losses import answer_accuracy, answer_loss, distillation_loss
from .muon import MuonWithAdamW
from .options import TrainOptions
from .stage_run import StageRun, load_part
from .tokenizer import build_tokenizer
from .turns import TurnPacker

_CLIPS_OFFSET = 40_000_000  # clips of this stage differ from those of the joint stage
_TRUTH_WEIGHT = 0.1
_FULL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Phase:
    """From `begins` (share of the stage) on: so many clips a step with so many visual tokens and text tokens."""

    begins: float
    clips: int
    num_visual: int
    text_len: int


PHASES = (Phase(0.0, 12, 128, 176), Phase(0.5, 8, NUM_VISUAL, 176))


def train_draft(options: TrainOptions) -> None:
    """Run or resume the stage; the result is the part "draft" of its checkpoint."""
    device = torch.device(options.device)
    tokenizer = build_tokenizer()
    packer = TurnPacker(tokenizer)
    tower = FrozenTower(options)
    target, target_layers = _load(TARGET_SIZE, "target", tokenizer.get_vocab(), options)
    target.requires_grad_(False)
    draft, draft_layers = _load(DRAFT_SIZE, "draft", tokenizer.get_vocab(), options)
    draft.story_head.requires_grad_(False)
    optimiser = MuonWithAdamW(draft, matrix_lr=2.5e-3, other_lr=2e-3)
    run = StageRun("distil", options, {"draft": draft, "optimiser": optimiser}, decay_from=0.3)
    generator = torch.Generator().manual_seed(options.seed + 9 + run.step)
    forward = PairForward(packer, options)
    for _ in run.steps():
        phase = [phase for phase in PHASES if phase.begins <= run.progress][-1]
        start = _CLIPS_OFFSET + run.clips_seen
        batch = make_clip_batch(packer, options.seed, start, phase.clips, phase.text_len, greedy_text=True).to(device)
        run.clips_seen += phase.clips
        keep = choose_tokens(batch.content.cpu(), phase.num_visual, generator).to(device)
        content = batch.content.gather(1, keep).cpu()
        layout = forward.layout(batch, keep)
        features = tower(batch.frames, generator)
        with torch.no_grad():
            everything = torch.ones_like(keep, dtype=torch.bool)
            wanted, _ = forward(target, target_layers, features, keep, layout, everything)
        visible = draft_visibility(content, _FULL_SHARE, generator).to(device)
        logits, _ = forward(draft, draft_layers, features, keep, layout, visible)
        loss = distillation_loss(logits, wanted, batch.weights)
        (loss + _TRUTH_WEIGHT * answer_loss(logits, batch.labels, batch.weights)).backward()
        norm = optimiser.step(run.lr_scale)
        answer = batch.is_caption
        agreed = (logits.argmax(-1) == wanted.argmax(-1)).float()
        full = visible.all(dim=1)
        figures = {"alpha": float(agreed[answer].mean())}
        if bool(full.any()):
            figures["alpha_full"] = float(agreed[full][answer[full]].mean())
        figures |= answer_accuracy(wanted, batch.labels, batch.weights, answer)
        run.report(kl=float(loss.detach()), norm=norm, **figures)


def _load(
    size: TextSize, part: Literal["target", "draft"], token_ids: dict[str, int], options: TrainOptions
) -> tuple[Learner, list[nn.Module]]:
    """A learner out of the joint stage, and the layers it uses."""
    _, learner = build_learner(size, token_ids, options.seed)
    learner.load_state_dict(load_part(options.work_dir, "joint", part))
    used = load_part(options.work_dir, "joint", "growth")["used"] if part == "target" else range(size.layers)
    return learner.to(options.device), [learner.lm.layers[index] for index in used]
