"""The evaluation: which facts of a caption are right, and after what captions are asked for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import torch
from transformers import PreTrainedTokenizerFast

from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.scene import sample_scene
from vidspec_models.training.evaluation import CaptionEvaluation, judge_caption
from vidspec_models.training.examples import ExamplePacker
from vidspec_models.training.loaded_model import LoadedModel
from vidspec_models.training.plain_evaluation import Marks


def test_one_wrong_word_makes_a_caption_wrong() -> None:
    facts: Marks = defaultdict(list)
    scene = sample_scene(0)
    assert judge_caption(scene, caption(scene), facts)
    assert not judge_caption(scene, caption(scene).replace("three", "two"), facts)
    assert facts["count"] == [True, False]
    assert facts["background"] == [True, True]
    assert not judge_caption(scene, "Nobody knows.", facts)
    assert facts["parses"] == [True, True, False]
    assert len(facts["count"]) == 2  # a text that is no caption has no facts to judge


@dataclass
class _Knows:
    """A model that describes a scene only if nothing was said before."""

    text: str
    processor: SimpleNamespace
    packer: ExamplePacker
    asked: list[tuple[str, str]] = field(default_factory=list)  # the system message, all that comes after the video

    def generate(self, _: torch.Tensor, asked: list[list[int]], __: int, instruction: str = "") -> list[list[int]]:
        tokenizer = self.processor.tokenizer
        prompts = [tokenizer.decode(ids) for ids in asked]
        self.asked += [(instruction, prompt) for prompt in prompts]
        knows = not instruction and prompts[0].count("assistant") == 1
        return [tokenizer.encode(self.text if knows else "three")] * len(asked)


def test_captions_are_also_asked_for_after_a_question_and_under_a_system_message(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    scene = sample_scene(0)
    model = _Knows(caption(scene), SimpleNamespace(tokenizer=tokenizer), ExamplePacker(tokenizer))
    evaluation = CaptionEvaluation(cast("LoadedModel", model))
    assert evaluation.add([scene], torch.zeros(0)) == [tokenizer.encode(caption(scene))]
    (_, alone), (_, after), (told, under) = model.asked
    assert alone == under
    assert "Describe the video." in alone
    assert told.count(".") == 2
    first, second = after.split("user", 1)
    assert "Describe" not in first
    assert second.endswith(alone)
    assert evaluation.result()["captions_all_right"] == {
        "alone": 1.0, "after a question": 0.0, "under a system message": 0.0,
    }  # fmt: skip
    assert evaluation.result()["caption_facts"]["parses"] == 1.0
