"""The exported pair: loads with plain transformers, is small enough, shares its tower, and recognises clips."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.bundled.captions import parse_caption
from vidspec_models.bundled.render import render, slot_times
from vidspec_models.bundled.scene import sample_scene

pytestmark = pytest.mark.skipif(
    not (BUNDLED_TARGET / "model.safetensors").exists(), reason="the weights are not in this checkout"
)
_MAX_BYTES = 48_000_000


def test_both_folders_fit_the_size_limit() -> None:
    files = [file for folder in (BUNDLED_TARGET, BUNDLED_DRAFT) for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= _MAX_BYTES


def test_the_pair_shares_tower_and_tokenizer() -> None:
    target, draft = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
        for folder in (BUNDLED_TARGET, BUNDLED_DRAFT)
    )
    for name, value in target.model.vision_tower.state_dict().items():
        assert torch.equal(value, draft.model.vision_tower.state_dict()[name]), name
    one, two = (AutoProcessor.from_pretrained(folder) for folder in (BUNDLED_TARGET, BUNDLED_DRAFT))
    assert one.tokenizer.get_vocab() == two.tokenizer.get_vocab()


def test_stock_generate_describes_a_clip() -> None:
    processor = AutoProcessor.from_pretrained(BUNDLED_TARGET)
    model = AutoModelForImageTextToText.from_pretrained(BUNDLED_TARGET, dtype=torch.float32).eval()
    for seed in (1, 2):
        scene = sample_scene(seed)
        chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Describe the video."}]}]
        prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
        frames = torch.from_numpy(render(scene, slot_times())).permute(0, 3, 1, 2)
        inputs = processor(text=prompt, videos=[frames], return_tensors="pt", do_sample_frames=False)
        output = model.generate(**inputs, max_new_tokens=160)
        text = processor.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        facts = parse_caption(text)
        assert facts is not None
        assert facts["background"] == scene.background
