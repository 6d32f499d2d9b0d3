"""What weights are loaded as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.unit.models.families.tiny_checkpoints import FAMILIES, save
from vidspec_models.decoder.int8 import widen
from vidspec_models.decoder.placement import Precision
from vidspec_models.loading.checkpoint import loading_dtype

pytestmark = pytest.mark.unit
INT8 = Precision(torch.float32, is_int8=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_in_16_bits_widens_to_what_loading_in_float32_gives(family: str, tmp_path: Path) -> None:
    save(family, tmp_path / "wide")
    loaded(tmp_path / "wide", torch.bfloat16).save_pretrained(tmp_path / "own")
    own = loaded(tmp_path / "own", loading_dtype(AutoConfig.from_pretrained(tmp_path / "own"), INT8))
    assert own.dtype is torch.bfloat16
    widen(own)
    wanted = dict(state(loaded(tmp_path / "own", torch.float32)))
    for name, tensor in state(own):
        assert tensor.dtype is wanted[name].dtype
        assert torch.equal(tensor, wanted.pop(name))
    assert not wanted


@pytest.mark.parametrize(
    ("own", "precision", "expected"),
    [
        (torch.bfloat16, INT8, torch.bfloat16),
        (torch.float16, INT8, torch.float16),
        (torch.float32, INT8, torch.float32),
        (None, INT8, torch.float32),
        (torch.float16, Precision(torch.bfloat16, is_int8=True), torch.bfloat16),
        (torch.bfloat16, Precision(torch.float32), torch.float32),
        (torch.float16, Precision(torch.bfloat16), torch.bfloat16),
    ],
)
def test_only_for_int8_on_a_cpu_a_checkpoint_is_loaded_in_its_own_type(
    own: torch.dtype | None, precision: Precision, expected: torch.dtype
) -> None:
    assert loading_dtype(AutoConfig.for_model("llava_onevision", dtype=own), precision) is expected


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)


def state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and all buffers, also those that no file has."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
