"""Exporting a pair from its checkpoints, and reopening it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.training.export import export_pair, reopen
from vidspec_models.training.options import TrainOptions
from vidspec_models.training.tokenizer import ADDED_PIECES, VOCAB_SIZE, build_tokenizer

pytestmark = pytest.mark.slow


def test_a_reopened_pair_is_exported_as_it_was(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path / "work", output_dir=tmp_path / "out")
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    for shipped, again in zip((BUNDLED_TARGET, BUNDLED_DRAFT), export_pair(options), strict=True):
        before, after = (load_file(folder / "model.safetensors") for folder in (shipped, again))
        assert before.keys() == after.keys()
        assert all(torch.equal(_known(before[name]), _known(after[name])) for name in before)


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainOptions(work_dir=tmp_path / "work", output_dir=tmp_path / "out")
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    before = options.output_dir / "target" / "config.json"
    before.parent.mkdir(parents=True)
    before.write_text("{}")
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("vidspec_models.training.export.LlavaOnevisionForConditionalGeneration.save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        export_pair(options)
    assert before.read_text() == "{}"


def _known(weight: torch.Tensor) -> torch.Tensor:
    """The weight without the rows of tokens that the shipped tokenizer may lack."""
    return weight[:719] if len(weight) == VOCAB_SIZE else weight


def test_a_hardened_target_is_what_later_stages_and_the_export_take(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path / "out")
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    joint = torch.load(tmp_path / "joint.pt", weights_only=True)["parts"]
    joint["target"]["newline"] = joint["target"]["newline"] + 1
    torch.save({"parts": {"target": joint["target"]}}, tmp_path / "harden.pt")
    before = load_file(BUNDLED_TARGET / "model.safetensors")
    after = load_file(export_pair(options)[0] / "model.safetensors")
    changed = [name for name in before if not torch.equal(_known(before[name]), _known(after[name]))]
    assert changed == ["image_newline"]


def test_a_token_that_the_exported_pair_lacks_begins_between_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vidspec_models.training.tokenizer.ADDED_PIECES", (*ADDED_PIECES, "by"))
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, TrainOptions(work_dir=tmp_path, output_dir=tmp_path))
    table = torch.load(tmp_path / "joint.pt", weights_only=True)["parts"]["draft"]["lm.embed_tokens.weight"]
    ids = build_tokenizer().get_vocab()
    assert torch.allclose(table[ids["by"]], (table[ids["b"]] + table[ids["y"]]) / 2)
