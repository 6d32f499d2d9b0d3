"""Writes the pair from a run's checkpoints as two Hugging Face folders, and turns such folders into checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
)

from vidspec_models.bundled.scene import FRAME_SIZE, NUM_SLOTS
from vidspec_models.training.architecture import FRAME_COUNTS, PATCH_SIDE, Role, build_model
from vidspec_models.training.forward import Learner
from vidspec_models.training.options import Stage, TrainOptions
from vidspec_models.training.stage_run import finished_target, load_part, write_checkpoint
from vidspec_models.training.tokenizer import CHAT_TEMPLATE, END, PAD, build_tokenizer


def export_pair(options: TrainOptions) -> tuple[Path, Path]:
    """Write target/ and draft/ under the output folder from the newest checkpoints; returns both paths."""
    tokenizer = build_tokenizer()
    has_distilled = (options.work_dir / "distil.pt").exists()
    target = _export("target", finished_target(options.work_dir), tokenizer, options)
    draft = _export("draft", "distil" if has_distilled else "joint", tokenizer, options)
    return target, draft


def _export(role: Role, stage: Stage, tokenizer: PreTrainedTokenizerFast, options: TrainOptions) -> Path:
    model = build_model(role, tokenizer.get_vocab(), options.seed)
    learner = Learner(model)
    learner.load_state_dict(load_part(options.work_dir, stage, role))
    learner.grow()  # layers that the run has not grown yet are shipped as identities: the same function, the full depth
    model.model.vision_tower.load_state_dict(load_part(options.work_dir, "tower", "tower"))
    model.set_attn_implementation("sdpa")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        do_sample=False,
        max_new_tokens=192,
    )
    folder, unfinished = options.output_dir / role, options.output_dir / f"{role}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(unfinished)
    _build_processor(tokenizer).save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)  # only now, so that a full disk does not leave us without any pair
    unfinished.rename(folder)
    return folder


def _build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionProcessor:
    """Frames of any size become 128 px squares in [-1, 1]."""
    pixels = {"size": {"height": FRAME_SIZE, "width": FRAME_SIZE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=[[FRAME_SIZE, FRAME_SIZE]], **pixels),
        video_processor=LlavaOnevisionVideoProcessor(num_frames=NUM_SLOTS, max_frames=FRAME_COUNTS[-1], **pixels),
        tokenizer=tokenizer,
        num_image_tokens=PATCH_SIDE * PATCH_SIDE,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )


def reopen(target: Path, draft: Path, options: TrainOptions) -> None:
    """Write the checkpoints of stages "tower" and "joint" without optimisers, so that only later stages can continue.

    Weights are the exported ones, in bfloat16's precision. Raises FileExistsError if a run has its own checkpoints.
    """
    paths = {stage: options.work_dir / f"{stage}.pt" for stage in ("tower", "joint")}
    if taken := [path for path in paths.values() if path.exists()]:
        raise FileExistsError(
            f"{taken[0]} is there already: leave out --from-shipped to go on from it, or choose another --work-dir"
        )
    models = {
        role: LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        for role, folder in (("target", target), ("draft", draft))
    }
    for model, folder in zip(models.values(), (target, draft), strict=True):
        _embed_added_pieces(model, folder)
    learners = {role: Learner(model).state_dict() for role, model in models.items()}
    write_checkpoint({"parts": {"tower": models["target"].model.vision_tower.state_dict()}}, paths["tower"])
    write_checkpoint({"parts": learners}, paths["joint"])


@torch.no_grad()
def _embed_added_pieces(model: LlavaOnevisionForConditionalGeneration, folder: Path) -> None:
    """Initialise a token that the exported tokenizer lacks as the mean of the tokens that it uses instead."""
    known = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = build_tokenizer()
    table = model.get_input_embeddings().weight
    for number in range(len(known), len(tokenizer)):
        parts = known(tokenizer.decode([number]), add_special_tokens=False).input_ids
        table[number] = table[parts].mean(dim=0)
