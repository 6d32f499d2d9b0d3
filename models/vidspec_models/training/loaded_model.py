"""An exported model for evaluation: loaded by stock `from_pretrained`; generates texts, or is judged on given ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, AutoProcessor

from vidspec_models.bundled.render import Pixels, render, slot_times
from vidspec_models.bundled.scene import Scene
from vidspec_models.decoder.int8 import compute_in_int8, language_linears, round_layers_to_four_bits, vision_linears
from vidspec_models.decoder.placement import resolve_precision
from vidspec_models.loading.spec import rounded_dtype
from vidspec_models.training.architecture import CELLS, NUM_VISUAL, register_attention
from vidspec_models.training.examples import IGNORE, Example, ExamplePacker, PackedText
from vidspec_models.training.forward import Learner, PackedForward
from vidspec_models.training.tokenizer import VIDEO
from vidspec_models.training.tower import tower_features


class LoadedModel:
    """One model of the pair on one device, from stock `from_pretrained`; all its answers come from stock modules."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        """`dtype` as in `vidspec serve`; int8 and int4 are computed as on a CPU, on any device."""
        precision = resolve_precision(dtype, torch.device(device), rounded_dtype=rounded_dtype(str(folder)))
        kind = torch.float32 if precision.is_int8 else precision.dtype
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=kind).to(device).eval()
        if precision.is_int8:
            language_model = self.model.model.language_model
            if precision.is_int4:
                round_layers_to_four_bits(language_model)
            compute_in_int8([*language_linears(language_model, self.model.lm_head), *vision_linears(self.model)])
        self.dtype_name = precision.name
        self.packer = ExamplePacker(self.processor.tokenizer)
        self._forward = PackedForward(compile_layers=False)

    def pixels(self, scenes: list[Scene]) -> torch.Tensor:
        """Processed canonical frames [C, 8, 3, 128, 128]."""
        return self.process([render(scene, slot_times()) for scene in scenes])

    def process(self, clips: list[Pixels]) -> torch.Tensor:
        """Processed pixels of the given frames."""
        videos = [torch.from_numpy(frames).permute(0, 3, 1, 2) for frames in clips]
        batch = self.processor.video_processor(videos=videos, return_tensors="pt", do_sample_frames=False)
        pixels: torch.Tensor = batch["pixel_values_videos"]
        return pixels.to(self.model.device, self.model.dtype)

    @torch.no_grad()
    def generate(
        self, pixels: torch.Tensor, asked: Sequence[list[int]], max_new_tokens: int, instruction: str = ""
    ) -> list[list[int]]:
        """Greedy answers of stock `generate`, as token ids with the end token.

        `asked` is all that comes after each clip, such as `packer.prompt_ids`; `instruction` is a system message.
        """
        tokenizer = self.processor.tokenizer
        video = [tokenizer.convert_tokens_to_ids(VIDEO)] * (pixels.shape[1] * CELLS + 1)
        before = [*self.packer.prefix_ids(instruction), *video]
        rows = [torch.tensor([*before, *after]) for after in asked]
        ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left").to(pixels.device)
        output = self.model.generate(
            input_ids=ids.where(ids >= 0, tokenizer.pad_token_id), attention_mask=(ids >= 0).long(),
            pixel_values_videos=pixels, do_sample=False, max_new_tokens=max_new_tokens,
        )  # fmt: skip
        end = tokenizer.eos_token_id
        answers = [row[ids.shape[1] :].tolist() for row in output]
        return [row[: row.index(end) + 1] if end in row else row for row in answers]

    @torch.no_grad()
    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Tower features of all frames [C * T, 256, W]."""
        return tower_features(self.model.model.vision_tower, pixels.flatten(0, 1))

    @torch.no_grad()
    def choices(
        self, features: torch.Tensor, text: PackedText, visible: torch.Tensor | None = None, *, in_pairs: bool = False
    ) -> torch.Tensor:
        """The likeliest next tokens [C, L] of packed text, with all or only some visual tokens [C, 512] visible.

        With `in_pairs`, a text is about a clip and the next one of the batch; the last is followed by the first.
        """
        learner = Learner(self.model).to(self.model.device)
        learner.lm.set_attn_implementation(register_attention())
        keep = torch.arange(NUM_VISUAL, device=features.device).expand(len(text.ids), -1)
        try:
            if in_pairs:
                return self._forward.side_by_side(learner, features, keep, text).argmax(-1)
            return self._forward(learner, features, keep, text, visible)[0].argmax(-1)
        finally:
            learner.lm.set_attn_implementation("sdpa")

    def judge(self, features: torch.Tensor, clips: list[list[Example]], *, in_pairs: bool = False) -> list[list[bool]]:
        """For each example of each clip, whether every token of its answer, with the end token, is the argmax.

        This equals greedy decoding, because up to the first wrong token both have the same context.
        """
        text = self.packer.pack(clips, max(sum(map(len, clip)) for clip in clips)).to(features.device)
        chosen = self.choices(features, text, in_pairs=in_pairs)
        is_right, is_answer = text.labels == chosen, text.labels != IGNORE
        return [
            [bool(is_right[row][is_answer[row] & (text.examples[row] == one)].all()) for one in range(1, len(clip) + 1)]
            for row, clip in enumerate(clips)
        ]
