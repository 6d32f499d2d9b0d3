"""The way of a pair out of its checkpoints, and back."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.training.export import export_pair, reopen
from vidspec_models.training.options import TrainOptions


def test_a_reopened_pair_is_exported_as_it_was(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path / "work", output_dir=tmp_path / "out")
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    for shipped, again in zip((BUNDLED_TARGET, BUNDLED_DRAFT), export_pair(options), strict=True):
        before, after = (load_file(folder / "model.safetensors") for folder in (shipped, again))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_hardened_target_is_what_later_stages_and_the_export_take(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path / "out")
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    joint = torch.load(tmp_path / "joint.pt", weights_only=True)["parts"]
    joint["target"]["newline"] = joint["target"]["newline"] + 1
    torch.save({"parts": {"target": joint["target"]}}, tmp_path / "harden.pt")
    before = load_file(BUNDLED_TARGET / "model.safetensors")
    after = load_file(export_pair(options)[0] / "model.safetensors")
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["image_newline"]
