"""Stage D: the draft alone, drawn to the frozen target's distribution on the text that the target is likely to say."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .architecture import DRAFT_SIZE, TARGET_SIZE
from .clip_batch import make_clip_batch
from .dropping import choose_tokens, draft_visibility
from .joint_stage import mean_figures
from .losses import answer_accuracy, answer_loss, distillation_loss
from .muon import MuonWithAdamW
from .options import TrainOptions
from .pair_forward import NUM_VISUAL, FrozenTower, PairForward, in_bfloat16, load_learner
from .stage_run import StageRun, finished_target
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
        self.target, self.target_layers = load_learner(
            TARGET_SIZE, "target", tokenizer.get_vocab(), options, finished_target(options.work_dir)
        )
        self.target.requires_grad_(False)
        self.draft, self.draft_layers = load_learner(DRAFT_SIZE, "draft", tokenizer.get_vocab(), options)
        self.draft.story_head.requires_grad_(False)
        self.phase = PHASES[0]
        self.first_clip = 0
        self._tower = FrozenTower(options)
        self._forward = PairForward(TurnPacker(tokenizer), options)
        self._options = options

    def run_unit(self, clips: slice) -> dict[str, float]:
        """Forward and backward over some of the step's clips; returns the figures to report."""
        numbers = range(self.first_clip + clips.start, self.first_clip + clips.stop)
        device = torch.device(self._options.device)
        generator = torch.Generator().manual_seed(self._options.seed * 1_000_003 + numbers.start)
        packer, text_len = self._forward.packer, self.phase.text_len
        batch = make_clip_batch(packer, self._options.seed, numbers, text_len, greedy_text=True).to(device)
        keep = choose_tokens(batch.content.cpu(), self.phase.num_visual, generator).to(device)
        content = batch.content.gather(1, keep).cpu()
        layout = self._forward.layout(batch, keep)
        everything = torch.ones_like(keep, dtype=torch.bool)
        visible = draft_visibility(content, _FULL_SHARE, generator).to(device)
        with in_bfloat16(device):
            features = self._tower(batch.frames, generator)
            with torch.no_grad():
                wanted, _ = self._forward(self.target, self.target_layers, features, keep, layout, everything)
            logits, _ = self._forward(self.draft, self.draft_layers, features, keep, layout, visible)
        wanted, logits = wanted.float(), logits.float()
        loss = distillation_loss(logits, wanted, batch.weights)
        truth = answer_loss(logits, batch.labels, batch.weights)
        self.gradients.add(loss + _TRUTH_WEIGHT * truth, len(numbers) / self.phase.clips)
        agreed = (logits.argmax(-1) == wanted.argmax(-1)).float()
        full = visible.all(dim=1)
        return {
            "kl": float(loss.detach()),
            "alpha": float(agreed[batch.is_caption].mean()),
            "alpha_full": float(agreed[full][batch.is_caption[full]].mean()),  # NaN, and skipped, where no clip is
            **answer_accuracy(wanted, batch.labels, batch.weights, batch.is_caption),
        }
