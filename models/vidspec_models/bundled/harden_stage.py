"""Stage C: the target alone learns to be served compressed; it is drawn to what it was before, seeing everything.

Large models read a fact from several tokens that say the same; this one was trained on whole clips of 8 frames and
reads it from particular ones, so it loses facts with them. Here tokens are merged and hidden as the service does it.
"""

from __future__ import annotations

import torch

from vidspec_models.compression.dycoke import num_left

from .architecture import CELLS, TARGET_SIZE
from .attributes import NUM_SLOTS
from .clip_batch import ClipBatch, make_clip_batch
from .compressed_view import Hiding, View, draw_view, merged_tokens
from .dropping import choose_tokens
from .joint_stage import mean_figures
from .lm_forward import block_mask, embed, make_layout, text_logits
from .losses import answer_accuracy, answer_loss, distillation_loss
from .muon import MuonWithAdamW
from .options import TrainOptions
from .pair_forward import FrozenTower, PairForward, in_bfloat16, load_learner
from .stage_run import StageRun
from .tokenizer import build_tokenizer
from .turns import TurnPacker
from .workers import GradientSum, Workers

_CLIPS_OFFSET = 60_000_000  # clips of this stage differ from those of the others
_CLIPS = 12
_TEXT_LEN = 168
_TEACHER_TOKENS = 104  # as the teacher was trained: all content, some background
_TRUTH_WEIGHT = 2.0
_NEGLECT_WEIGHT = 0.3
_LONG_SHARE = 0.4


def harden_target(options: TrainOptions) -> None:
    """Run or resume the stage; the result is the part "target" of its checkpoint."""
    torch._dynamo.config.cache_size_limit = 64
    workers = Workers(options.device, options.workers)
    step = HardenStep(options)
    optimiser = MuonWithAdamW(step.target, matrix_lr=6e-4, other_lr=3e-4)
    optimiser.use_workers(workers)
    step.gradients = GradientSum(optimiser.params)
    run = StageRun("harden", options, {"target": step.target, "optimiser": optimiser}, decay_from=0.3)
    for _ in run.steps():
        step.first_clip = _CLIPS_OFFSET + run.clips_seen
        found = workers.map(step.run_unit, workers.units(_CLIPS), key=_CLIPS)
        run.clips_seen += _CLIPS
        norm = optimiser.step(run.lr_scale)
        run.report(norm=norm, **mean_figures(found))


class HardenStep:
    """One step, cut into units of a few clips; each unit has one view of its clips."""

    gradients: GradientSum

    def __init__(self, options: TrainOptions) -> None:
        tokenizer = build_tokenizer()
        self.teacher, self._teacher_layers = load_learner(TARGET_SIZE, "target", tokenizer.get_vocab(), options)
        self.teacher.requires_grad_(False)
        self.target, self._layers = load_learner(TARGET_SIZE, "target", tokenizer.get_vocab(), options)
        self.target.story_head.requires_grad_(False)
        self.first_clip = 0
        self.tower = FrozenTower(options)
        self.forward = PairForward(TurnPacker(tokenizer), options)
        self._options = options

    def run_unit(self, clips: slice) -> dict[str, float]:
        """Forward and backward over some of the step's clips; returns the figures to report."""
        numbers = range(self.first_clip + clips.start, self.first_clip + clips.stop)
        device = torch.device(self._options.device)
        generator = torch.Generator().manual_seed(self._options.seed * 1_000_003 + numbers.start)
        view = draw_view(generator, _LONG_SHARE)
        batch = make_clip_batch(
            self.forward.packer, self._options.seed, numbers, _TEXT_LEN,
            greedy_text=True, num_frames=view.num_frames,
        ).to(device)  # fmt: skip
        with in_bfloat16(device):
            features = self.tower(batch.frames, generator, is_noisy=view.is_noisy)
            wanted = self.taught(batch, features, view, generator)
            logits, neglect = self.seen(batch, features, view, generator)
        logits = logits.float()
        divergence = distillation_loss(logits, wanted, batch.weights)
        truth = answer_loss(logits, batch.labels, batch.weights)
        self.gradients.add(divergence + _TRUTH_WEIGHT * truth + _NEGLECT_WEIGHT * neglect, len(numbers) / _CLIPS)
        figures = {"kl": float(divergence.detach()), "neglect": float(neglect.detach())}
        accuracy = answer_accuracy(logits, batch.labels, batch.weights, batch.is_caption)
        taught = answer_accuracy(wanted, batch.labels, batch.weights, batch.is_caption)
        figures |= {f"t_{name}": value for name, value in taught.items()}
        return figures | {f"{_label(view)}_{name}": value for name, value in accuracy.items()}

    @torch.no_grad()
    def taught(self, batch: ClipBatch, features: torch.Tensor, view: View, generator: torch.Generator) -> torch.Tensor:
        """The teacher's logits; of longer clips it sees as many frames as it knows."""
        stride = view.num_frames // NUM_SLOTS
        phase = int(torch.randint(stride, (1,), generator=generator))
        clips = len(batch.ids)
        shown = features.unflatten(0, (clips, -1))[:, phase::stride].flatten(0, 1)
        content = batch.content.unflatten(1, (-1, CELLS))[:, phase::stride].flatten(1)
        keep = choose_tokens(content.cpu(), _TEACHER_TOKENS, generator).to(content.device)
        layout = self.forward.layout(batch, keep)
        everything = torch.ones_like(keep, dtype=torch.bool)
        logits, _ = self.forward(self.teacher, self._teacher_layers, shown, keep, layout, everything)
        return logits.float()

    def seen(
        self, batch: ClipBatch, features: torch.Tensor, view: View, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the target that sees the view, and its neglect of what is worth seeing."""
        num_cells = view.num_frames * CELLS
        everything = torch.arange(num_cells, device=features.device).expand(len(batch.ids), -1)
        tokens = self.target.project(features, everything)
        keep = merged_tokens(tokens, view.merge_ratio) if view.merge_ratio else everything
        seen = num_left(keep.shape[1], view.hide_ratio)
        if view.most_tokens is not None:
            content = batch.content.gather(1, keep)
            keep = keep.gather(1, choose_tokens(content.cpu(), view.most_tokens, generator).to(keep.device))
        text = (batch.ids, batch.positions + num_cells - NUM_SLOTS * CELLS, batch.segments)
        layout = make_layout(self.forward.prefix, keep, num_cells, text)
        embeds = embed(self.target, layout, tokens.gather(1, keep[:, :, None].expand(-1, -1, tokens.shape[2])))
        mask = block_mask(layout, torch.ones_like(keep, dtype=torch.bool))
        hiding = None
        if view.hide_ratio:
            hiding = Hiding(layout, batch.is_caption, batch.worth.gather(1, keep), view.layer, seen)
        hidden, neglect = self._run(embeds, mask, layout.positions, hiding)
        return text_logits(self.target, hidden, layout), neglect

    def _run(
        self, embeds: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, hiding: Hiding | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised hidden states; from the hiding's layer on under its mask."""
        lm = self.target.lm
        rotary = lm.rotary_emb(embeds, positions)
        hidden, neglect = embeds, embeds.new_zeros(())
        for index, layer in enumerate(self._layers):
            before = mask
            if hiding is not None and index + 1 == hiding.layer:
                attention = hiding.attention(layer, hidden, mask, rotary)
                neglect = hiding.neglect(attention)
                mask = hiding.close(mask, attention)
            hidden = self.forward.layer(layer, hidden, before, rotary)
        return lm.norm(hidden), neglect


def _label(view: View) -> str:
    """Which figures belong together in the log."""
    name = "dycoke" if view.hide_ratio else "ttm" if view.merge_ratio else "none"
    return f"{name}{view.num_frames}"
