"""What the bench and the child process of one configuration say to each other."""

from __future__ import annotations

import msgspec

from vidspec_models.spec import ModelSpec
from vidspec_service.bench.compression.scoring import Score
from vidspec_service.engine.types import DyCoke


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Comes first, once."""

    spec: ModelSpec
    threads: int
    dycoke: DyCoke
    max_tokens: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model runs."""

    device: str
    device_name: str  # of the accelerator; empty on CPU
    dtype: str


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A caption of a test scene at so many frames; what is timed."""

    seed: int
    frames: int


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; bytes are of keys and values at the last token, `peak_bytes` of the process (or the device) so far."""

    score: Score
    is_all_right: bool
    prompt_tokens: int
    video_tokens: int
    num_tokens: int
    prepare_s: float  # template, vision tower, embedding
    prefill_s: float  # merging and the language model's prefill
    decode_s: float  # of all tokens but the first
    stored_bytes: int
    attended_bytes: int
    peak_bytes: int


class Question(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All questions about a test scene; comes after every `Describe`, for it needs more memory."""

    seed: int
    frames: int
