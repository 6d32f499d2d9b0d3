"""The stage *widen*: the target alone learns more ways to ask and to answer, from the true texts.

It starts from a trained target, so its learning rates are small; captions and descriptions stay a large part of the
data. Half of the clips have more than 8 frames. Most units of 8 frames show every token, as in serving.
"""

from __future__ import annotations

import torch

from vidspec_models.bundled.scene import NUM_SLOTS
from vidspec_models.training.architecture import CELLS, NUM_VISUAL
from vidspec_models.training.examples import (
    ExamplePacker,
    choose_tokens,
    draw_num_frames,
    draw_num_visual,
    make_clip_batch,
)
from vidspec_models.training.forward import answer_accuracy, answer_loss, in_bfloat16, make_layout
from vidspec_models.training.language_stage import LanguageStage, Phase
from vidspec_models.training.lookups import LookupLoss
from vidspec_models.training.options import TrainOptions


class WidenStage(LanguageStage):
    """Cross-entropy on all answers and on where three heads attend; some units also show two clips at once."""

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
