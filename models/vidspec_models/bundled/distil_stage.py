"""Stage C: the draft alone, drawn to the frozen target's distribution on the text that the target is likely to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from vidspec_models.processor import multiplies_bfloat16

from .architecture import DRAFT_SIZE, TARGET_SIZE, TextSize
from .clip_batch import make_clip_batch
from .dropping import choose_tokens, draft_visibility
from .joint_stage import NUM_VISUAL, FrozenTower, PairForward, build_learner, mean_figures
from .lm_forward import Learner
from .losses import answer_accuracy, answer_loss, distillation_loss
from .muon import MuonWithAdamW
from .options import TrainOptions
from .stage_run import StageRun, load_part
from .tokenizer import build_tokenizer
from .turns import TurnPacker
from .workers import GradientSum, Workers

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


PHASES = (Phase(0.0, 12, 96, 168), Phase(0.88, 8, NUM_VISUAL, 160))


def train_draft(options: TrainOptions) -> None:
    """Run or resume the stage; the result is the part "draft" of its checkpoint."""
    workers = Workers(options.device, options.workers)
    step = DistilStep(options)
    optimiser = MuonWithAdamW(step.draft, matrix_lr=2.5e-3, other_lr=2e-3)
    optimiser.use_workers(workers)
    step.gradients = GradientSum(optimiser.params)
    run = StageRun("distil", options, {"draft": step.draft, "optimiser": optimiser}, decay_from=0.3)
    for _ in run.steps():
        step.phase = [phase for phase in PHASES if phase.begins <= run.progress][-1]
        step.first_clip = _CLIPS_OFFSET + run.clips_seen
        found = workers.map(step.run_unit, workers.units(step.phase.clips), key=step.phase)
        run.clips_seen += step.phase.clips
        norm = optimiser.step(run.lr_scale)
        run.report(norm=norm, **mean_figures(found))


class DistilStep:
    """One step, cut into units of a few clips; the target is frozen and sees every token that is present."""

    gradients: GradientSum

    def __init__(self, options: TrainOptions) -> None:
        tokenizer = build_tokenizer()
        self.target, self.target_layers = _load(TARGET_SIZE, "target", tokenizer.get_vocab(), options)
        self.target.requires_grad_(False)
        self.draft, self.draft_layers = _load(DRAFT_SIZE, "draft", tokenizer.get_vocab(), options)
        self.draft.story_head.requires_grad_(False)
        self.phase = PHASES[0]
        self.first_clip = 0
        self._tower = FrozenTower(options)
        self._forward = PairForward(TurnPacker(tokenizer), options)
        self._options = options

    def run_unit(self, clips: slice) -> dict[str, float]:
        """Forward and backward over some of the step's clips; returns the figures to report."""
        first, count = self.first_clip + clips.start, clips.stop - clips.start
        device = torch.device(self._options.device)
        generator = torch.Generator().manual_seed(self._options.seed * 1_000_003 + first)
        packer, text_len = self._forward.packer, self.phase.text_len
        batch = make_clip_batch(packer, self._options.seed, first, count, text_len, greedy_text=True).to(device)
        keep = choose_tokens(batch.content.cpu(), self.phase.num_visual, generator).to(device)
        content = batch.content.gather(1, keep).cpu()
        layout = self._forward.layout(batch, keep)
        features = self._tower(batch.frames, generator)
        everything = torch.ones_like(keep, dtype=torch.bool)
        is_narrow = device.type == "cuda" or multiplies_bfloat16()  # as the target is served there
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=is_narrow):
            found, _ = self._forward(self.target, self.target_layers, features, keep, layout, everything)
            wanted = found.float()
        visible = draft_visibility(content, _FULL_SHARE, generator).to(device)
        logits, _ = self._forward(self.draft, self.draft_layers, features, keep, layout, visible)
        loss = distillation_loss(logits, wanted, batch.weights)
        truth = answer_loss(logits, batch.labels, batch.weights)
        self.gradients.add(loss + _TRUTH_WEIGHT * truth, count / self.phase.clips)
        agreed = (logits.argmax(-1) == wanted.argmax(-1)).float()
        full = visible.all(dim=1)
        return {
            "kl": float(loss.detach()),
            "alpha": float(agreed[batch.is_caption].mean()),
            "alpha_full": float(agreed[full][batch.is_caption[full]].mean()),  # NaN, and skipped, where no clip is
            **answer_accuracy(wanted, batch.labels, batch.weights, batch.is_caption),
        }


def _load(
    size: TextSize, part: Literal["target", "draft"], token_ids: dict[str, int], options: TrainOptions
) -> tuple[Learner, list[nn.Module]]:
    """A learner out of the joint stage, and the layers it uses."""
    _, learner = build_learner(size, token_ids, options.seed)
    learner.load_state_dict(load_part(options.work_dir, "joint", part))
    used = load_part(options.work_dir, "joint", "growth")["used"] if part == "target" else range(size.layers)
    return learner.to(options.device), [learner.lm.layers[index] for index in used]
