"""Stage B: target and draft learn to talk about clips together; the tower is frozen.

Time is saved in the early phases without changing the task: only part of the visual tokens is present (those with
content first), and the target starts with every second layer. New layers enter as identities, so growing loses
nothing. The last phase sees every token.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import nn

from .architecture import DRAFT_SIZE, TARGET_SIZE
from .clip_batch import ClipBatch, make_clip_batch
from .dropping import choose_tokens, draft_visibility, target_visibility
from .lm_forward import Learner, calibrate_projector, grow_layers
from .losses import answer_accuracy, answer_loss, distillation_loss, story_accuracy, story_loss
from .muon import MuonWithAdamW
from .options import TrainOptions
from .pair_forward import NUM_VISUAL, FrozenTower, PairForward, build_learner
from .stage_run import StageRun
from .tokenizer import build_tokenizer
from .turns import TurnPacker
from .workers import GradientSum, Workers

logger = logging.getLogger(__name__)

_STORY_WEIGHT = 0.3
_DRAFT_FULL_SHARE = 0.45


@dataclass(frozen=True, slots=True)
class Phase:
    """From `begins` (share of the stage) on: so many clips a step, visual tokens, text tokens, these target layers."""

    begins: float
    clips: int
    num_visual: int
    text_len: int
    layer_step: int


PHASES = (
    Phase(0.0, 8, 96, 176, 2),
    Phase(0.5, 12, 104, 192, 1),
    Phase(0.96, 8, NUM_VISUAL, 160, 1),
)


def train_joint(options: TrainOptions) -> None:
    """Run or resume the stage; the results are the parts "target" and "draft" of its checkpoint."""
    torch._dynamo.config.cache_size_limit = 64
    workers = Workers(options.device, options.workers)
    tokenizer = build_tokenizer()
    packer = TurnPacker(tokenizer)
    token_ids = tokenizer.get_vocab()
    tower = FrozenTower(options)
    _, target = build_learner(TARGET_SIZE, token_ids, options.seed + 1)
    _, draft = build_learner(DRAFT_SIZE, token_ids, options.seed + 2)
    growth = Growth(list(range(0, TARGET_SIZE.layers, PHASES[0].layer_step)))
    optimiser = MuonWithAdamW(nn.ModuleList([target, draft]), matrix_lr=2.5e-3, other_lr=2.5e-3)
    parts = {"target": target, "draft": draft, "optimiser": optimiser, "growth": growth}
    generator = torch.Generator().manual_seed(options.seed + 5)
    first = make_clip_batch(packer, options.seed, range(4), PHASES[0].text_len)
    for learner in (target, draft):
        calibrate_projector(learner.to(options.device), tower(first.frames, generator))
    run = StageRun("joint", options, parts)
    optimiser.use_workers(workers)
    step = JointStep(PairForward(packer, options), tower, (target, draft), GradientSum(optimiser.params), options)
    for _ in run.steps():
        phase = [phase for phase in PHASES if phase.begins <= run.progress][-1]
        if phase.layer_step == 1 and len(growth.used) < TARGET_SIZE.layers:
            grow_layers(target.lm.layers, growth.used)
            growth.used = list(range(TARGET_SIZE.layers))
            logger.info("target grown to %d layers at step %d", TARGET_SIZE.layers, run.step)
        step.layers = [target.lm.layers[index] for index in growth.used]
        step.phase, step.progress, step.first_clip = phase, run.progress, run.clips_seen
        found = workers.map(step.run_unit, workers.units(phase.clips), key=phase)
        run.clips_seen += phase.clips
        norm = optimiser.step(run.lr_scale)
        run.report(norm=norm, **mean_figures(found))


class Growth:
    """Which target layers are in use; part of the checkpoint."""

    def __init__(self, used: list[int]) -> None:
        self.used = used

    def state_dict(self) -> dict[str, list[int]]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.used = state["used"]


class JointStep:
    """One optimiser step, cut into units of a few clips that workers run side by side."""

    def __init__(
        self, forward: PairForward, tower: FrozenTower, learners: tuple[Learner, Learner], gradients: GradientSum,
        options: TrainOptions,
    ) -> None:  # fmt: skip
        self.forward = forward
        self.tower = tower
        self.target, self.draft = learners
        self.layers: list[nn.Module] = []
        self.phase = PHASES[0]
        self.progress = 0.0
        self.first_clip = 0
        self._gradients = gradients
        self._seed = options.seed

    def run_unit(self, clips: slice) -> dict[str, float]:
        """Forward and backward over some of the step's clips; returns the figures to report."""
        numbers = range(self.first_clip + clips.start, self.first_clip + clips.stop)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + numbers.start)
        batch = make_clip_batch(self.forward.packer, self._seed, numbers, self.phase.text_len)
        loss, figures = self.losses(batch, generator)
        self._gradients.add(loss, len(numbers) / self.phase.clips)
        return figures

    def losses(self, batch: ClipBatch, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of both models on one unit; the draft leans on the target the more the better that one is."""
        target, draft, phase, layers = self.target, self.draft, self.phase, self.layers
        device = next(target.parameters()).device
        batch = batch.to(device)
        keep = choose_tokens(batch.content.cpu(), phase.num_visual, generator).to(device)
        content = batch.content.gather(1, keep).cpu()
        story = {name: values.gather(1, keep) for name, values in batch.story.items()}
        layout = self.forward.layout(batch, keep)
        features = self.tower(batch.frames, generator)
        seen = target_visibility(content, generator).to(device)
        logits, story_logits = self.forward(target, layers, features, keep, layout, seen)

        target_answer = answer_loss(logits, batch.labels, batch.weights)
        loss = target_answer + _STORY_WEIGHT * story_loss(story_logits, story)

        # The draft learns from half of the clips: it has its own stage after this one.
        half = slice(0, len(keep) // 2)
        labels, weights = batch.labels[half], batch.weights[half]
        draft_seen = draft_visibility(content[half], _DRAFT_FULL_SHARE, generator).to(device)
        draft_features = features[: len(features) // 2]
        draft_logits, draft_story = self.forward(
            draft, list(draft.lm.layers), draft_features, keep[half], layout.part(half), draft_seen
        )
        trust = min(self.progress / 0.4, 0.9)
        loss = loss + (1 - trust) * answer_loss(draft_logits, labels, weights)
        loss = loss + trust * distillation_loss(draft_logits, logits[half], weights)
        loss = loss + _STORY_WEIGHT * story_loss(draft_story, {name: values[half] for name, values in story.items()})
        figures = {"loss": float(target_answer.detach())}
        figures |= answer_accuracy(logits, batch.labels, batch.weights, batch.is_caption)
        figures |= {f"story_{name}": story_accuracy(story_logits, story, name) for name in ("start", "direction")}
        drafted = answer_accuracy(draft_logits, labels, weights, batch.is_caption[half])
        figures |= {f"d_{name}": value for name, value in drafted.items()}
        return loss, figures


def mean_figures(found: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every figure over the units that have it."""
    means = {}
    for name in sorted({name for figures in found for name in figures}):
        known = [figures[name] for figures in found if not math.isnan(figures.get(name, math.nan))]
        if known:
            means[name] = sum(known) / len(known)
    return means
