"""The stages in order, and three of them: *joint*, where target and draft learn to answer, *widen*, *distil*.

The early phases of *joint* and *distil* save time without changing the task: only some visual tokens are present (those
with content first), and the target starts the joint stage with every second layer. New layers start as identities, so
growing loses nothing. The last phase sees every token. The tower is frozen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from vidspec_models.bundled.scene import NUM_SLOTS
from vidspec_models.training.architecture import CELLS, NUM_VISUAL, build_model
from vidspec_models.training.examples import (
    IGNORE,
    ExamplePacker,
    choose_tokens,
    draw_num_frames,
    draw_num_visual,
    make_clip_batch,
)
from vidspec_models.training.export import export_pair
from vidspec_models.training.forward import (
    Learner,
    answer_accuracy,
    answer_loss,
    distillation_loss,
    in_bfloat16,
    make_layout,
)
from vidspec_models.training.harden import HardenStage
from vidspec_models.training.language_stage import LanguageStage, Phase, run_stage
from vidspec_models.training.lookups import LookupLoss
from vidspec_models.training.options import Stage, TrainOptions
from vidspec_models.training.stage_run import finished_target
from vidspec_models.training.tower import train_tower

logger = logging.getLogger(__name__)


def train(options: TrainOptions) -> None:
    """Run the chosen stages and export the pair if there is one; a finished stage is skipped when resuming.

    On CPUs set `THP_MEM_ALLOC_ENABLE=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184
    MALLOC_ARENA_MAX=1 OMP_WAIT_POLICY=PASSIVE` before starting: page faults otherwise take half of the time.
    """
    torch.manual_seed(options.seed)
    runs: dict[Stage, Callable[[TrainOptions], None]] = {
        "tower": train_tower,
        "joint": partial(run_stage, JointStage),
        "widen": partial(run_stage, WidenStage),
        "harden": partial(run_stage, HardenStage),
        "distil": partial(run_stage, DistilStage),
    }
    for stage in options.stages:
        logger.info("stage %s: %.1f minutes", stage, options.minutes(stage))
        runs[stage](options)
    if options.missing_for("distil"):
        logger.info("there is no pair to export before stage joint")
        return
    target, draft = export_pair(options)
    logger.info("exported %s and %s", target, draft)


class JointStage(LanguageStage):
    """Target and draft learn from the true texts; as the target improves, the draft learns more from the target."""

    name = "joint"
    phases = (
        Phase(0.0, 8, 96, 208, layer_step=2),
        Phase(0.5, 12, 104, 208),
        Phase(0.96, 8, NUM_VISUAL, 208),
    )
    learning_rates = (2.5e-3, 2.5e-3)
    _STORY_WEIGHT = 0.3
    _DRAFT_FULL_SHARE = 0.45

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        self.target = Learner(build_model("target", self.tokenizer.get_vocab(), options.seed + 1))
        self.draft = Learner(build_model("draft", self.tokenizer.get_vocab(), options.seed + 2))
        batch = make_clip_batch(self.packer, options.seed, range(4), self.phases[0].text_len)
        generator = torch.Generator().manual_seed(options.seed + 5)
        for learner in (self.target, self.draft):
            learner.to(self.device).calibrate_projector(self.tower(batch.frames, generator))
        self.target.used = self.target.used[:: self.phases[0].layer_step]
        self.trained = {"target": self.target, "draft": self.draft}

    def begin_step(self, phase: Phase, progress: float) -> None:
        """Let the target grow when the phase uses all layers."""
        super().begin_step(phase, progress)
        if phase.layer_step == 1 and len(self.target.layers) < len(self.target.lm.layers):
            self.target.grow()
            logger.info("target grown to %d layers", len(self.target.layers))

    def loss(self, clips: range, phase: Phase, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        target, draft, device = self.target, self.draft, self.device
        batch = make_clip_batch(self.packer, self.options.seed, clips, phase.text_len).to(device)
        keep = choose_tokens(batch.content.cpu(), phase.num_visual, generator).to(device)
        content = batch.content.gather(1, keep).cpu()
        story = {name: values.gather(1, keep) for name, values in batch.story.items()}
        features = self.tower(batch.frames, generator)
        seen = target_visibility(content, generator).to(device)
        logits, middle = self.forward(target, features, keep, batch.text, seen)
        story_logits = target.story_logits(middle)
        target_answer = answer_loss(logits, batch.text)
        loss = target_answer + self._STORY_WEIGHT * story_loss(story_logits, story)

        # The draft learns from half of the clips: it has its own stage later.
        half = slice(0, len(keep) // 2)
        text = batch.text.part(half)
        draft_seen = draft_visibility(content[half], self._DRAFT_FULL_SHARE, generator).to(device)
        draft_logits, draft_middle = self.forward(
            draft, features[: len(keep[half]) * NUM_SLOTS], keep[half], text, draft_seen
        )
        trust = min(self.progress / 0.4, 0.9)
        loss = loss + (1 - trust) * answer_loss(draft_logits, text)
        loss = loss + trust * distillation_loss(draft_logits, logits[half], text)
        draft_story = {name: values[half] for name, values in story.items()}
        loss = loss + self._STORY_WEIGHT * story_loss(draft.story_logits(draft_middle), draft_story)
        figures = {"loss": float(target_answer.detach())}
        figures |= answer_accuracy(logits, batch.text) | answer_accuracy(draft_logits, text, "d_")
        figures |= {f"story_{name}": story_accuracy(story_logits, story, name) for name in ("start", "direction")}
        return loss, figures


def story_loss(logits: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean of the heads' cross-entropies."""
    known = {name: labels[name] != IGNORE for name in logits}
    losses = [F.cross_entropy(logits[name][at], labels[name][at]) for name, at in known.items() if bool(at.any())]
    return torch.stack(losses).mean() if losses else torch.zeros(())


@torch.no_grad()
def story_accuracy(logits: dict[str, torch.Tensor], labels: dict[str, torch.Tensor], name: str) -> float:
    known = labels[name] != IGNORE
    return float((logits[name].argmax(-1)[known] == labels[name][known]).float().mean())


class WidenStage(LanguageStage):
    """The target alone learns more ways to ask and to answer, from the true texts: cross-entropy on all answers and on
    where three heads attend.

    It starts from a trained target, so its learning rates are small; captions and descriptions stay a large part of the
    data. Half of the clips have more than 8 frames. Most units of 8 frames show every token, as in serving; some also
    show two clips at once.
    """

    name = "widen"
    phases = (Phase(0.0, 12, NUM_VISUAL, 384),)
    first_clip = 20_000_000
    learning_rates = (4e-4, 2e-4)
    pair_share = 0.4  # of the units of 8 frames
    decay_from = 0.2
    # Share of clips with a long answer; at first low, because understanding questions takes more examples than seeing.
    # Captions get worse meanwhile, and recover later.
    _LONG_SHARE, _LONG_SHARE_LATER, _LATER = 0.65, 0.9, 0.4
    _PAIR_WEIGHT = 0.5
    _LOOKUP_WEIGHT = 0.2  # low, because the loss of the answers, which are nearly all right, is low, too
    # Share of the units of 8 frames. With few tokens, more than half show content, and their number gives away how many
    # objects there are: a target trained on little else counted two of three objects when it saw all tokens.
    _FEW_SHARE, _FEW_TOKENS = 0.25, 104

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        self.packer = ExamplePacker(self.tokenizer, long_share=self._LONG_SHARE)
        self.target = self.load_learner("target")
        self.target.grow()
        self.target.story_head.requires_grad_(False)
        self.trained = {"target": self.target}

    def begin_step(self, phase: Phase, progress: float) -> None:
        super().begin_step(phase, progress)
        self.packer.long_share = self._LONG_SHARE if progress < self._LATER else self._LONG_SHARE_LATER

    def loss(self, clips: range, phase: Phase, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        num_frames = draw_num_frames(generator)
        batch = make_clip_batch(self.packer, self.options.seed, clips, phase.text_len, num_frames=num_frames)
        batch = batch.to(self.device)
        pairs = self.pair_text(clips, generator) if num_frames == NUM_SLOTS else None
        if num_frames > NUM_SLOTS:
            num_visual = draw_num_visual(num_frames, generator)
        else:
            is_few = float(torch.rand(1, generator=generator)) < self._FEW_SHARE
            num_visual = self._FEW_TOKENS if is_few else phase.num_visual
        keep = choose_tokens(batch.content.cpu(), num_visual, generator).to(self.device)
        with in_bfloat16(self.device):
            features = self.tower(batch.frames, generator)
            layout = make_layout(keep, num_frames * CELLS, batch.text)
            lookups = LookupLoss(layout, batch.text, batch.owner.gather(1, keep))
            visual = self.target.project(features, keep)
            logits, _ = self.forward.run(self.target, layout, visual, next_mask=lookups.next_mask)
        logits = logits.float()
        loss = answer_loss(logits, batch.text)
        figures = {"loss": float(loss.detach()), "lookups": float(lookups.value.detach())}
        figures |= answer_accuracy(logits, batch.text, f"of{num_frames}_")
        loss = loss + self._LOOKUP_WEIGHT * lookups.value
        if pairs is not None:
            with in_bfloat16(self.device):
                paired = self.forward.side_by_side(self.target, features, keep, pairs).float()
            loss = loss + self._PAIR_WEIGHT * answer_loss(paired, pairs)
            figures["pair"] = answer_accuracy(paired, pairs)["qa"]
        return loss, figures


class DistilStage(LanguageStage):
    """The draft learns the frozen target's distribution on texts that the target is likely to say, of 8 to 32 frames.

    The target sees every token that is present.
    """

    name = "distil"
    phases = (Phase(0.0, 12, 96, 208), Phase(0.88, 8, NUM_VISUAL, 208))
    first_clip = 40_000_000
    learning_rates = (2.5e-3, 2e-3)
    decay_from = 0.3
    _TRUTH_WEIGHT = 0.1
    _FULL_SHARE = 0.5

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        self._target = self.load_learner("target", finished_target(options.work_dir)).requires_grad_(False)
        self.draft = self.load_learner("draft")
        self.draft.story_head.requires_grad_(False)
        self.trained = {"draft": self.draft}

    def loss(self, clips: range, phase: Phase, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        device = self.device
        num_frames = draw_num_frames(generator)
        batch = make_clip_batch(
            self.packer, self.options.seed, clips, phase.text_len, greedy_text=True, num_frames=num_frames
        ).to(device)
        num_visual = phase.num_visual * (num_frames // NUM_SLOTS)
        keep = choose_tokens(batch.content.cpu(), num_visual, generator).to(device)
        content = batch.content.gather(1, keep).cpu()
        visible = draft_visibility(content, self._FULL_SHARE, generator).to(device)
        with in_bfloat16(device):
            features = self.tower(batch.frames, generator)
            with torch.no_grad():
                wanted, _ = self.forward(self._target, features, keep, batch.text)
            logits, _ = self.forward(self.draft, features, keep, batch.text, visible)
        wanted, logits = wanted.float(), logits.float()
        divergence = distillation_loss(logits, wanted, batch.text)
        truth = answer_loss(logits, batch.text)
        agreed = (logits.argmax(-1) == wanted.argmax(-1)).float()
        full = visible.all(dim=1)
        return divergence + self._TRUTH_WEIGHT * truth, {
            "kl": float(divergence.detach()),
            f"alpha{num_frames}": float(agreed[batch.text.is_caption].mean()),
            "alpha_full": float(agreed[full][batch.text.is_caption[full]].mean()),
            **answer_accuracy(wanted, batch.text),
        }


def draft_visibility(content: torch.Tensor, full_share: float, generator: torch.Generator) -> torch.Tensor:
    """Visible tokens [C, K] for the draft: some clips show all, some nothing, the rest a random or biased share."""
    count, size = content.shape
    kind = torch.rand(count, 1, generator=generator)
    keep_share = torch.rand(count, 1, generator=generator) ** 2 * 0.6 + 0.03
    bias = torch.where(torch.rand(count, 1, generator=generator) < 0.5, 0.8, 0.0)
    rank = torch.rand(count, size, generator=generator) + bias * content.float()
    order = rank.argsort(dim=1, descending=True).argsort(dim=1)
    visible = order < (keep_share * size)
    blind = kind > 1 - 0.25 * (1 - full_share)
    return (visible & ~blind) | (kind < full_share)


def target_visibility(content: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Visible tokens [C, K] for the target: a fifth of the clips lose up to half of their tokens."""
    count, size = content.shape
    lost = torch.rand(count, 1, generator=generator) * 0.5
    loses = torch.rand(count, 1, generator=generator) < 0.2
    return (torch.rand(count, size, generator=generator) >= lost) | ~loses
