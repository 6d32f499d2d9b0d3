"""Chat turns as token ids: one clip's caption and questions packed behind one shared video.

Each turn sees the video and itself, nothing of the other turns, and its positions start right after the video:
the model is trained exactly as on single-turn chats, but pays for the long visual prefix once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from .architecture import VIDEO_TOKENS
from .captions import caption
from .labels import IGNORE
from .questions import CAPTION_PROMPTS, QUESTION_TYPES, TRAINING_WEIGHTS, ask
from .scene import Scene
from .tokenizer import END, START, attribute_words

_FACT_WEIGHT = 2.0  # words that name a fact, within captions
_ANSWER_WEIGHT = 3.0  # the one word of a short answer
_END_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class PackedTurns:
    """The text part of one packed sequence, each array [L]; `labels[i]` is the token after position i."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    segments: NDArray[np.int64]  # 1.. per turn, -1 padding
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]
    is_caption: NDArray[np.bool_]


class TurnPacker:
    """Encodes and packs; holds the tokenizer and what it needs of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.convert_tokens_to_ids(START)
        self._end = tokenizer.convert_tokens_to_ids(END)
        self.prefix = [self._start, *self.encode("user ")]
        self._assistant = self.encode("assistant\n")
        words = attribute_words()
        self._facts = {self.encode(prefix + word)[0] for word in words for prefix in ("", " ")}
        weights = np.array([TRAINING_WEIGHTS.get(kind, 1.0) for kind in QUESTION_TYPES])
        self._chances = weights / weights.sum()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def prompt_ids(self, prompt: str) -> list[int]:
        """Everything between the video and the answer."""
        return [*self.encode("\n" + prompt), self._end, self._start, *self._assistant]

    def pack(self, scene: Scene, length: int, rng: np.random.Generator, *, greedy_text: bool = False) -> PackedTurns:
        """The caption turn, then as many weighted random questions as fit.

        `greedy_text` takes the likeliest phrasings, which are what a trained target says.
        """
        packed = PackedTurns(
            ids=np.full(length, self._end, np.int64),
            positions=np.zeros(length, np.int64),
            segments=np.full(length, -1, np.int64),
            labels=np.full(length, IGNORE, np.int64),
            weights=np.zeros(length, np.float32),
            is_caption=np.zeros(length, np.bool_),
        )
        prompt = CAPTION_PROMPTS[int(rng.integers(len(CAPTION_PROMPTS)))]
        text = caption(scene, by_attribute_share=1.0) if greedy_text else caption(scene)
        filled = self._put(packed, 0, 1, prompt, text, is_caption=True)
        segment, misses = 2, 0
        while misses < 6:
            kind = QUESTION_TYPES[int(rng.choice(len(QUESTION_TYPES), p=self._chances))]
            question = ask(scene, kind, rng)
            end = filled if question is None else self._put(packed, filled, segment, question.text, question.answer)
            misses += end == filled
            segment += end > filled
            filled = end
        return packed

    def _put(
        self, packed: PackedTurns, at: int, segment: int, prompt: str, answer: str, *, is_caption: bool = False
    ) -> int:
        asked = self.prompt_ids(prompt)
        said = [*self.encode(answer), self._end]
        end = at + len(asked) + len(said)
        if end > len(packed.ids):
            return at
        packed.ids[at:end] = asked + said
        packed.positions[at:end] = len(self.prefix) + VIDEO_TOKENS + np.arange(end - at)
        packed.segments[at:end] = segment
        answering = slice(at + len(asked) - 1, end - 1)
        packed.labels[answering] = said
        packed.is_caption[answering] = is_caption
        if is_caption:
            packed.weights[answering] = [_FACT_WEIGHT if token in self._facts else 1.0 for token in said]
        else:
            packed.weights[answering] = [_ANSWER_WEIGHT] * (len(said) - 1) + [_END_WEIGHT]
        return end
