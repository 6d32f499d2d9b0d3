"""Writes the trained pair as two ordinary Hugging Face folders that plain `from_pretrained` loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
)

from .architecture import DRAFT_SIZE, PATCH_SIDE, TARGET_SIZE, TextSize
from .attributes import FRAME_SIZE, NUM_SLOTS
from .lm_forward import grow_layers
from .options import TrainOptions
from .pair_forward import build_learner
from .stage_run import finished_target, load_part
from .tokenizer import CHAT_TEMPLATE, END, PAD, build_tokenizer


def export_pair(options: TrainOptions) -> tuple[Path, Path]:
    """Write target/ and draft/ under the output folder from the newest checkpoints; returns both paths."""
    tokenizer = build_tokenizer()
    has_distilled = (options.work_dir / "distil.pt").exists()
    target_state = load_part(options.work_dir, finished_target(options.work_dir), "target")
    draft_state = load_part(options.work_dir, "distil" if has_distilled else "joint", "draft")
    target = _export_model(TARGET_SIZE, target_state, tokenizer, options, "target")
    draft = _export_model(DRAFT_SIZE, draft_state, tokenizer, options, "draft")
    return target, draft


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionProcessor:
    """Frames of any size become 128 px squares in [-1, 1]."""
    pixels = {"size": {"height": FRAME_SIZE, "width": FRAME_SIZE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=[[FRAME_SIZE, FRAME_SIZE]], **pixels),
        video_processor=LlavaOnevisionVideoProcessor(num_frames=NUM_SLOTS, **pixels),  # the frames to sample
        tokenizer=tokenizer,
        num_image_tokens=PATCH_SIDE * PATCH_SIDE,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )


def _export_model(
    size: TextSize, state: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerFast, options: TrainOptions, role: str
) -> Path:
    model, learner = build_learner(size, tokenizer.get_vocab(), options.seed)
    learner.load_state_dict(state)
    if role == "target":
        # Layers that the run has not grown yet are shipped as identities: the same function, the full depth.
        grow_layers(learner.lm.layers, load_part(options.work_dir, "joint", "growth")["used"])
    model.model.image_newline.data.copy_(learner.newline.data)
    model.model.vision_tower.load_state_dict(load_part(options.work_dir, "tower", "tower"))
    model.set_attn_implementation("sdpa")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        do_sample=False,
        max_new_tokens=192,
    )
    folder = options.output_dir / role
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)
    return folder
