"""Recipe: a folder that names a random model to create, in place of a checkpoint's weights. Does not import torch.

Shapes are those of released checkpoints: language models as in their config.json, prompts of 32 x 196 video tokens.
Only the language model is created. A vision tower runs once per video before the first token and takes no part in
decoding; its output, embeddings of video tokens, is random. Positions are plain numbers: for text, which is all that
decoding adds, Qwen2.5-VL's three axes are equal, so that its decoder is Qwen2's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer, models

_FILE = "random_weights.json"
_WORD = "prompt"
WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "int4": 0.5}  # of one weight, by data type


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Qwen2 language model. `num_tokens` of the vocabulary are tokens, the rest pads the matrix."""

    source: str  # hub id whose text_config this is
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    num_tokens: int
    context_length: int
    is_tied: bool  # head and embedding are one matrix
    rope_theta: float = 1e6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def step_parameters(self) -> int:
        """Parameters that every step reads: all layers and the head (of the embedding it reads only single rows)."""
        queries = self.num_heads * self.head_dim
        keys_and_values = 2 * self.num_kv_heads * self.head_dim
        projections = (queries + keys_and_values) * (self.hidden_size + 1) + queries * self.hidden_size
        layer = projections + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size * (self.vocabulary + 1)

    def parameters(self) -> int:
        """All parameters of the language model."""
        return self.step_parameters() + (0 if self.is_tied else self.hidden_size * self.vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShape:
    """A target, its draft, and the shape of their prompt: frames as square grids of tokens, then text."""

    target: ModelShape
    draft: ModelShape
    num_frames: int = 32
    frame_tokens: int = 196
    text_tokens: int = 64

    @property
    def video_tokens(self) -> int:
        return self.num_frames * self.frame_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.video_tokens + self.text_tokens


_LLAVA, _QWEN = "llava-hf/llava-onevision-qwen2", "Qwen/Qwen2.5-VL"
_NUM_TOKENS = 151646  # of Qwen2's tokenizer; the matrices are padded beyond it, each model's by its own amount
_LLAVA_7B = ModelShape(f"{_LLAVA}-7b-ov-hf", 3584, 18944, 28, 28, 4, 152128, _NUM_TOKENS, 32768, False)
_LLAVA_HALF_B = ModelShape(f"{_LLAVA}-0.5b-ov-hf", 896, 4864, 24, 14, 2, 152000, _NUM_TOKENS, 32768, True)
_QWEN_7B = ModelShape(f"{_QWEN}-7B-Instruct", 3584, 18944, 28, 28, 4, 152064, _NUM_TOKENS, 128000, False)
_QWEN_3B = ModelShape(f"{_QWEN}-3B-Instruct", 2048, 11008, 36, 16, 2, 151936, _NUM_TOKENS, 128000, True)
_SMALL_TARGET = ModelShape("none", 448, 2368, 4, 7, 1, 8192, 8000, 2048, False)
_SMALL_DRAFT = ModelShape("none", 224, 1216, 2, 7, 1, 8128, 8000, 2048, True)
_TINY_TARGET = ModelShape("none", 128, 256, 4, 4, 2, 512, 500, 1024, False)
_TINY_DRAFT = ModelShape("none", 64, 128, 2, 4, 2, 508, 500, 1024, False)
SHAPES = {
    "llava-onevision-7b+0.5b": PairShape(target=_LLAVA_7B, draft=_LLAVA_HALF_B),
    "llava-onevision-7b-of-14-layers+0.5b": PairShape(target=replace(_LLAVA_7B, num_layers=14), draft=_LLAVA_HALF_B),
    "llava-onevision-7b-of-4-layers+0.5b": PairShape(target=replace(_LLAVA_7B, num_layers=4), draft=_LLAVA_HALF_B),
    "qwen2.5-vl-7b+3b": PairShape(target=_QWEN_7B, draft=_QWEN_3B),
    # With the proportions of the first pair, but small enough for a CPU.
    "small": PairShape(target=_SMALL_TARGET, draft=_SMALL_DRAFT, num_frames=8, frame_tokens=49, text_tokens=16),
    "tiny": PairShape(target=_TINY_TARGET, draft=_TINY_DRAFT, num_frames=4, frame_tokens=9, text_tokens=12),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Replaces a draft's choice: by the target's own next token with probability `acceptance`, else by another token.

    `references` is a JSON file that maps a prompt index to the token ids of the target alone; it is read at each
    prefill, so it may be written after the draft was loaded.
    """

    acceptance: float
    seed: int
    references: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One model of a pair in SHAPES. The same recipe gives the same weights on the same kind of device."""

    pair: str
    role: str  # "target" | "draft"
    seed: int = 0
    oracle: Oracle | None = None

    @property
    def pair_shape(self) -> PairShape:
        return SHAPES[self.pair]

    @property
    def shape(self) -> ModelShape:
        return self.pair_shape.target if self.role == "target" else self.pair_shape.draft

    def write(self, folder: Path) -> None:
        """Create the folder, with a dummy tokenizer: only ids are compared."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")
        Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))


def find_recipe(path: str) -> Recipe | None:
    """The recipe in a folder; None if the model path is not a recipe."""
    file = Path(path) / _FILE
    if not file.is_file():
        return None
    fields = json.loads(file.read_text(encoding="utf-8"))
    oracle = fields.pop("oracle")
    return Recipe(**fields, oracle=Oracle(**oracle) if oracle else None)


def prompt_text(index: int) -> str:
    """The text of a request that asks for prompt `index`: random models know their prompts by number."""
    return f"{_WORD} {index}"


def prompt_index(text: str) -> int:
    """The inverse of `prompt_text`; raises ValueError for any other text."""
    word, _, number = text.partition(" ")
    if word != _WORD:
        raise ValueError(f"a random model is asked {prompt_text(0)!r} and the like, not {text!r}")
    return int(number)
