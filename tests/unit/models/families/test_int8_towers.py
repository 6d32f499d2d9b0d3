"""Every family's vision tower in int8: features as by transformers' modules with rounded weights and rows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from tests.unit.models.families import tiny_checkpoints
from tests.unit.models.families.test_exactness import clip
from tests.unit.models.families.tiny_checkpoints import FAMILIES, save
from vidspec_models.backends.cpu import tower
from vidspec_models.decoder.int8 import compute_in_int8, fake_quantise, vision_linears
from vidspec_models.loading.checkpoint import load_processor
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec, find_family

pytestmark = pytest.mark.unit


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In bfloat16, as released ones are; its language model has sizes that int8 allows."""
    monkeypatch.setitem(tiny_checkpoints._TEXT, "intermediate_size", 128)
    save(request.param, tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    return tmp_path


@torch.inference_mode()
def test_features_are_those_of_rounded_weights_and_rows(checkpoint: Path) -> None:
    found, wanted, exact = loaded(checkpoint), stock(checkpoint, compute_in_int8), stock(checkpoint, len)
    errors = [float((each - wanted).abs().mean() / wanted.abs().mean()) for each in (found, exact)]
    assert errors[0] < errors[1] / 2
    assert errors[1] < 0.1


@torch.inference_mode()
def test_without_kernels_rounded_weights_are_used_in_float32(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(tower, "compile_tower", fail)
    assert torch.allclose(loaded(checkpoint), stock(checkpoint, fake_quantise), atol=1e-4)


def loaded(checkpoint: Path) -> Tensor:
    return (
        load_model(ModelSpec(role="target", path=str(checkpoint), device="cpu", dtype="int8")).encode(clip(1)).features
    )


def stock(checkpoint: Path, change: Callable[[list[nn.Linear]], object]) -> Tensor:
    """The features from transformers' own modules, whose vision linears are changed."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    change(vision_linears(model))
    family = find_family(model.config.model_type)(model, load_processor(str(checkpoint), None))
    (encoded,) = family.encode_parts(clip(1), lambda: False)
    return encoded.features
