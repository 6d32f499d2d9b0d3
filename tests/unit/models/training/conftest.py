"""One tokenizer for all tests of the training: learning it takes two seconds."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from vidspec_models.training.tokenizer import build_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()
