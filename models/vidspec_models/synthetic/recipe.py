"""Recipe: a folder that says which random model to make, where a checkpoint would have its weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer, models

from vidspec_models.synthetic.shapes import SHAPES, PairShape, Shape

_FILE = "random_weights.json"
_WORD = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """What replaces a draft's judgement: the target's own next token with probability `acceptance`, else another.

    `references` is a JSON file of prompt index to the token ids that the target gave on its own; it is read at each
    prefill, so it may be written after the draft was loaded.
    """

    acceptance: float
    seed: int
    references: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One half of a pair of SHAPES. The same recipe makes the same weights on the same kind of device."""

    pair: str
    role: str  # "target" | "draft"
    seed: int = 0
    oracle: Oracle | None = None

    @property
    def pair_shape(self) -> PairShape:
        return SHAPES[self.pair]

    @property
    def shape(self) -> Shape:
        return self.pair_shape.target if self.role == "target" else self.pair_shape.draft

    def write(self, folder: Path) -> None:
        """Make the folder, with a tokenizer that has nothing to say: ids are all that is compared."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")
        Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))


def find_recipe(path: str) -> Recipe | None:
    """The recipe in a folder; None for everything else that a model path can be."""
    file = Path(path) / _FILE
    if not file.is_file():
        return None
    fields = json.loads(file.read_text(encoding="utf-8"))
    oracle = fields.pop("oracle")
    return Recipe(**fields, oracle=Oracle(**oracle) if oracle else None)


def prompt_text(index: int) -> str:
    """What a request says to be asked prompt `index`: a random model knows its prompts by number."""
    return f"{_WORD} {index}"


def prompt_index(text: str) -> int:
    """Its inverse; raises ValueError for another text."""
    word, _, number = text.partition(" ")
    if word != _WORD:
        raise ValueError(f"a random model is asked {prompt_text(0)!r} and the like, not {text!r}")
    return int(number)
