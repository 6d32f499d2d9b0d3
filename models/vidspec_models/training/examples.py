"""Training data of the language stages: freshly rendered clips, each with its caption and questions packed after it.

An example is a prompt about the clip and its answer. It sees the video, itself, and the examples that it follows up on;
its positions start right after the video or after those: the model is trained exactly as on chats, but computes the
long visual prefix only once. Some examples see no video at all. A few clips are foreign: their answer is always
UNKNOWN. A batch also has dense labels: what a visual token should know about a thing's past.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from vidspec_models.bundled.captions import NO_SIGN
from vidspec_models.bundled.foreign import render_foreign
from vidspec_models.bundled.phrasings import UNKNOWN
from vidspec_models.bundled.render import OWNER_SIGN, render_with_owners
from vidspec_models.bundled.scene import (
    CELL_PX,
    CELL_SIDE,
    NUM_SLOTS,
    NUMBERS,
    REGIONS,
    TRAIN_SEEDS,
    WORDS,
    Scene,
    sample_scene,
)
from vidspec_models.training.architecture import CELLS, FRAME_COUNTS
from vidspec_models.training.conversations import (
    Exchange,
    draw_begun,
    draw_foreign,
    draw_instruction,
    draw_long,
    draw_pair,
    draw_short,
)
from vidspec_models.training.tokenizer import END, START, attribute_words

IGNORE = -100
EVERY_THING = 0  # subject of the sentence that counts the things
Labels = NDArray[np.int64]
STORY_HEADS = {
    "start": len(REGIONS), "direction": len(WORDS["direction"]), "timing": len(WORDS["timing"]),
    "first_colour": len(WORDS["colour"]),
}  # fmt: skip
_THING_COVER = 0.12  # a cell shows a thing that covers more than this share of it; smaller slivers are ignored
_MARGIN_PX = 4
TEXT_ONLY = 1000  # segments above this number see no video

_TELLING = re.compile(r"\{[^{}]*\}")  # one thing or letter in a JSON description
_SENTENCE = re.compile(r"[^.]+\.")

_FOREIGN_SHARE = 0.07
_FACT_WEIGHT = 2.0  # words that name a fact, within captions
_SETTLING_WEIGHT = 4.0  # see PackedText.settles; without it, the target left out the middle one of three objects
_JSON_WEIGHT = 0.5  # other tokens of a description, mostly keys
_ANSWER_WEIGHT = 3.0  # the words of a short answer
_CONCLUSION_WEIGHT = 8.0
_OPENING = 8  # number of first tokens, in which a reason shows what was asked
_LONGEST_WORD = 4  # most tokens of an answer that is not a sentence, including the end token
_END_WEIGHT = 0.3  # end token; also all of UNKNOWN after its first token, because it is always the same
_SHARES = {8: 0.5, 16: 0.3, 32: 0.2}  # frames per clip -> share of units, in stages that train on longer clips
_THIN_SHARE, _THIN_TOKENS = 0.75, 320
_TURN_WEIGHT = 4.0  # of the first words of a long answer that follows another one: without it, that one was repeated
_TURN_WORDS = 4
_FOLLOW_SHARE = 0.75  # share of examples that follow up on the one before
_TOLD_LAST_SHARE = 0.75  # share of captions and descriptions that come after the questions
_TWICE_SHARE = 0.4  # share of clips with a long answer that have another one, if there is room
_BEGUN_SHARE = 0.25  # share of what comes in place of questions about a scene: the beginning of a long answer
_BEGUN_TOKENS = 5  # the last of them hardly counts, like the end token of other answers
_TIME_JITTER = 1 / 8  # of the time between two frames
_CLIPS_PER_RUN = 100_000_000
_FIRST_CLIP = 50_000_000  # smaller numbers belong to the tower stage
_LETTER_WORTH = 8.0  # high, because few cells show a letter, and no others hold that information


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt about a clip and its answer, as token ids: everything after the video."""

    prompt: list[int]
    answer: list[int]
    is_caption: bool = False  # a caption or JSON description, a long answer
    sees_video: bool = True
    follows: bool = False  # the same conversation as the example before
    subjects: list[int] = field(default_factory=list)  # subject of each token of a long answer

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, slots=True)
class PackedText:
    """The text parts of packed sequences, each tensor [C, L]; `labels[:, i]` is the token after position i."""

    prefix: torch.Tensor  # [C, P]: a system message, if any, and all else that comes before the video
    ids: torch.Tensor
    positions: torch.Tensor  # within a conversation, from 0
    segments: torch.Tensor  # 1.. per conversation, TEXT_ONLY + 1.. without the video, -1 padding
    examples: torch.Tensor  # 1.. per example, -1 padding
    labels: torch.Tensor  # IGNORE where no answer is
    weights: torch.Tensor
    is_caption: torch.Tensor
    # How an answer's reason relates to the question that the answer repeats; `LookupLoss` uses these.
    likeness: torch.Tensor  # column of the same word in the question, else of its first word; IGNORE if no fact
    is_ground: torch.Tensor  # words of the reason that are also in the question; if none, the question's first word
    concludes: torch.Tensor  # positions before the words of the conclusion
    subject: torch.Tensor  # what the next token is about, numbered as in an owner map; EVERY_THING; IGNORE: nothing
    settles: torch.Tensor  # the next token settles which subject comes next, or is in the sentence that counts things

    def to(self, device: torch.device | str) -> PackedText:
        return PackedText(*(getattr(self, field.name).to(device) for field in fields(self)))

    def part(self, clips: slice) -> PackedText:
        """The texts of some of the clips."""
        return PackedText(*(getattr(self, field.name)[clips] for field in fields(self)))


class ExamplePacker:
    """Encodes and packs examples; holds the tokenizer and the token ids that it needs."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, long_share: float = 1.0) -> None:
        """`long_share` of the clips have a caption or a description; the others have more questions instead."""
        self._tokenizer = tokenizer
        self.long_share = long_share
        self._start = tokenizer.convert_tokens_to_ids(START)
        self._end = tokenizer.convert_tokens_to_ids(END)
        self.prefix = [self._start, *self._encode("user ")]
        self._assistant = self._encode("assistant\n")
        words = (*attribute_words(), "yes", "no")
        self._facts = {self._encode(prefix + word)[-1] for word in words for prefix in ("", " ")}
        self._so = self._encode(", so")[-1]
        self._brace = self._encode('{"')[0]
        self._colon = self._encode('":"')[0]
        self._question_mark = self._encode("?")[0]
        self._unknown = [*self._encode(UNKNOWN), self._end]

    def prefix_ids(self, instruction: str) -> list[int]:
        """Everything before the video; no instruction if empty."""
        told = [self._start, *self._encode("system "), *self._encode("\n" + instruction), self._end]
        return [*(told if instruction else []), *self.prefix]

    def prompt_ids(self, prompt: str) -> list[int]:
        """Everything between the video and the answer."""
        return [*self._encode("\n" + prompt), self._end, self._start, *self._assistant]

    def example(
        self, prompt: str, answer: str, *, is_caption: bool = False, sees_video: bool = True, follows: bool = False
    ) -> Example:
        """The flags are those of Example."""
        asked = self.prompt_ids(prompt)
        return Example(
            asked if sees_video and not follows else [*self.prefix, *asked],
            [*self._encode(answer), self._end],
            is_caption,
            sees_video,
            follows,
            self._subjects(answer) if is_caption else [],
        )

    def draw(self, scene: Scene, length: int, rng: np.random.Generator, *, greedy_text: bool = False) -> list[Example]:
        """Captions or descriptions: none, one or two; and as many weighted random questions as fit."""
        tellings: list[Exchange] = []
        if rng.random() < self.long_share:
            wanted = 2 if rng.random() < _TWICE_SHARE else 1
            tellings = self._fill(lambda: draw_long(scene, rng, greedy_text=greedy_text), length, wanted)
        room = length - sum(map(self._length, tellings))
        asked = self._fill(
            lambda: draw_begun(scene, rng) if rng.random() < _BEGUN_SHARE else draw_short(scene, rng), room
        )
        exchanges = asked + tellings if rng.random() < _TOLD_LAST_SHARE else tellings + asked
        examples: list[Example] = []
        may_follow = False
        for each in exchanges:
            follows = may_follow and each.sees_video and (each.is_begun or rng.random() < _FOLLOW_SHARE)
            examples.append(self._of_exchange(each, follows=follows))
            may_follow = each.sees_video and not each.is_begun
        return examples

    def draw_foreign(self, length: int, rng: np.random.Generator) -> list[Example]:
        """Examples for a foreign clip."""
        return [self._of_exchange(each) for each in self._fill(lambda: draw_foreign(rng), length)]

    def draw_pair(self, first: Scene, second: Scene, length: int, rng: np.random.Generator) -> list[Example]:
        """Questions about two clips that are shown one after the other."""
        return [self._of_exchange(each) for each in self._fill(lambda: draw_pair(first, second, rng), length)]

    def _fill(self, draw: Callable[[], Exchange | None], room: int, most: int = sys.maxsize) -> list[Exchange]:
        found: list[Exchange] = []
        misses = 0
        while misses < 6 and len(found) < most:
            exchange = draw()
            length = room + 1 if exchange is None else self._length(exchange)
            if exchange is None or length > room:
                misses += 1
            else:
                found.append(exchange)
                room -= length
        return found

    def _length(self, exchange: Exchange) -> int:
        """The number of tokens at most: if it follows up."""
        return len(self._of_exchange(exchange, follows=True))

    def _of_exchange(self, exchange: Exchange, *, follows: bool = False) -> Example:
        example = self.example(
            exchange.prompt,
            exchange.answer,
            is_caption=exchange.is_long,
            sees_video=exchange.sees_video,
            follows=follows,
        )
        return replace(example, answer=example.answer[:_BEGUN_TOKENS]) if exchange.is_begun else example

    def pack(self, clips: list[list[Example]], length: int, instruction: str = "") -> PackedText:
        """Put each clip's examples one after the other; together they have at most `length` tokens."""
        shape = (len(clips), length)
        packed = PackedText(
            prefix=torch.tensor(self.prefix_ids(instruction)).expand(len(clips), -1),
            ids=torch.full(shape, self._end),
            positions=torch.zeros(shape, dtype=torch.long),
            segments=torch.full(shape, -1),
            examples=torch.full(shape, -1),
            labels=torch.full(shape, IGNORE),
            weights=torch.zeros(shape),
            is_caption=torch.zeros(shape, dtype=torch.bool),
            likeness=torch.full(shape, IGNORE),
            is_ground=torch.zeros(shape, dtype=torch.bool),
            concludes=torch.zeros(shape, dtype=torch.bool),
            subject=torch.full(shape, IGNORE),
            settles=torch.zeros(shape, dtype=torch.bool),
        )
        for row, examples in enumerate(clips):
            at = start = segment = 0
            for number, example in enumerate(examples, 1):
                if not example.follows:
                    start, segment = at, segment + 1
                end = at + len(example)
                packed.ids[row, at:end] = torch.tensor(example.prompt + example.answer)
                packed.positions[row, at:end] = torch.arange(at - start, end - start)
                packed.segments[row, at:end] = segment if example.sees_video else TEXT_ONLY + segment
                packed.examples[row, at:end] = number
                answering = slice(at + len(example.prompt) - 1, end - 1)
                packed.labels[row, answering] = torch.tensor(example.answer)
                packed.is_caption[row, answering] = example.is_caption
                packed.weights[row, answering] = torch.tensor(self._weights(example))
                self._mark_lookups(packed, row, at + len(example.prompt), example.answer)
                if example.subjects:
                    packed.subject[row, answering] = torch.tensor([*example.subjects, IGNORE])
                    packed.settles[row, answering] = torch.tensor(self._settling(example))
                at = end
        return packed

    def _mark_lookups(self, packed: PackedText, row: int, start: int, answer: list[int]) -> None:
        """Mark an answer that repeats the question, if this names a fact: "Is it red? It is blue, so no."."""
        if self._question_mark not in answer or self._so not in answer:
            return
        asked = answer[: answer.index(self._question_mark)]
        if self._facts.isdisjoint(asked):
            return
        concludes_at = _last(answer, self._so)
        grounds = []
        for at in range(len(asked), concludes_at):
            if (word := answer[at]) in self._facts:
                packed.likeness[row, start + at] = start + (asked.index(word) if word in asked else 0)
                grounds += [start + at] if word in asked else []
        packed.is_ground[row, grounds or [start]] = True
        packed.concludes[row, start + concludes_at : start + len(answer) - 3] = True  # up to the last word

    def _subjects(self, answer: str) -> list[int]:
        """The subject of each token of a caption or description; a token on the border of two counts for the second."""
        spans = subject_spans(answer)
        encoded = self._tokenizer.backend_tokenizer.encode(answer, add_special_tokens=False)
        return [
            next((subject for start, end, subject in spans if start < last <= end), IGNORE)
            for _, last in encoded.offsets
        ]

    def _settling(self, example: Example) -> list[bool]:
        """Per token of a long answer: is it at or before the first fact about a subject, or does it count things?"""
        is_json = example.answer[0] == self._brace  # in JSON, a key may be the same word as a fact
        found, told, before, is_settled = [], example.answer, IGNORE, True
        for at, subject in enumerate([*example.subjects, IGNORE]):
            is_settled = is_settled and subject == before
            found.append(subject != IGNORE and (subject == EVERY_THING or not is_settled))
            is_fact = told[at] in self._facts and (not is_json or told[at - 1] == self._colon)
            is_settled, before = is_settled or is_fact, subject
        return found

    def _weights(self, example: Example) -> list[float]:
        if example.is_caption:
            other = _JSON_WEIGHT if example.answer[0] == self._brace else 1.0
            weights = [_FACT_WEIGHT if token in self._facts else other for token in example.answer]
            if example.follows:
                weights[:_TURN_WORDS] = [_TURN_WEIGHT] * _TURN_WORDS
            settling = self._settling(example)
            return [_SETTLING_WEIGHT if settles else weight for weight, settles in zip(weights, settling, strict=True)]
        if example.answer != self._unknown and self._so in example.answer[_LONGEST_WORD:]:  # it has a reason
            return self._weights_of_reasoned(example.answer)
        num_words = 1 if example.answer == self._unknown else len(example.answer) - 1
        return [_ANSWER_WEIGHT] * num_words + [_END_WEIGHT] * (len(example.answer) - num_words)

    def _weights_of_reasoned(self, answer: list[int]) -> list[float]:
        """The conclusion is hardest to learn and weighs most; then the opening, which chooses the reason, and facts."""
        concludes_at = _last(answer, self._so) + 1
        weights = [_ANSWER_WEIGHT if at < _OPENING or token in self._facts else 2.0 for at, token in enumerate(answer)]
        for at in range(concludes_at, len(answer) - 2):  # up to the full stop
            weights[at] = _CONCLUSION_WEIGHT
        return weights

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _last(ids: list[int], token: int) -> int:
    return len(ids) - 1 - ids[::-1].index(token)


def subject_spans(told: str) -> list[tuple[int, int, int]]:
    """First character, end and subject of each part of a true caption or description that has a subject."""
    if told.startswith("{"):
        tellings = [match.span() for match in _TELLING.finditer(told)]
        num_things = sum(end < told.index('"letters"') for _, end in tellings)
        starts = [start if number == 0 else tellings[number - 1][1] for number, (start, _) in enumerate(tellings)]
        spans, first = list(zip(starts, (end for _, end in tellings), strict=True)), []
    else:
        _, counting, *spans = [match.span() for match in _SENTENCE.finditer(told)]
        num_things = next(NUMBERS.index(word) for word in told[slice(*counting)].split() if word in NUMBERS)
        spans = spans[:num_things] if told.endswith(f"{NO_SIGN}.") else spans
        first = [(*counting, EVERY_THING)]
    owners = [*range(1, num_things + 1), *range(OWNER_SIGN, OWNER_SIGN + len(spans) - num_things)]
    return first + [(*span, owner) for span, owner in zip(spans, owners, strict=True)]


@dataclass(frozen=True, slots=True)
class ClipBatch:
    """C clips of T frames; visual tokens are counted in frame order, without the newline."""

    frames: torch.Tensor  # [C * T, 128, 128, 3] uint8
    content: torch.Tensor  # [C, T * 64] bool: a thing or letter touches the cell
    owner: torch.Tensor  # [C, T * 64] what covers the cell most: 0 nothing, 1.. things, OWNER_SIGN.. letters
    story: dict[str, torch.Tensor]  # [C, T * 64] labels
    text: PackedText

    @property
    def worth(self) -> torch.Tensor:
        """[C, T * 64] float: 1 where a cell shows a thing, more where it shows a letter."""
        return torch.where(self.owner >= OWNER_SIGN, _LETTER_WORTH, (self.owner > 0).float())

    def to(self, device: torch.device) -> ClipBatch:
        """Moves everything but the frames, which the tower moves itself."""
        return replace(
            self,
            content=self.content.to(device),
            owner=self.owner.to(device),
            story={name: values.to(device) for name, values in self.story.items()},
            text=self.text.to(device),
        )


def make_clip_batch(
    packer: ExamplePacker, seed: int, clips: range, text_len: int, *, greedy_text: bool = False,
    num_frames: int = NUM_SLOTS,
) -> ClipBatch:  # fmt: skip
    """The training clips of these numbers; deterministic."""
    instruction = draw_instruction(np.random.default_rng([training_scene(seed, _FIRST_CLIP + clips.start).seed, 43]))
    # An instruction takes room from the text, since every length of the whole needs a graph of its own.
    text_len -= len(packer.prefix_ids(instruction)) - len(packer.prefix)
    frames, content, owner, story, drawn = [], [], [], [], []
    for index in clips:
        scene = training_scene(seed, _FIRST_CLIP + index)
        rng = np.random.default_rng([scene.seed, 19])
        times = (np.arange(num_frames) + 0.5 + rng.uniform(-_TIME_JITTER, _TIME_JITTER, num_frames)) / num_frames
        if is_foreign(scene):
            pixels = render_foreign(scene.seed, num_frames)
            cells = find_cells(np.zeros(pixels.shape[:3], np.uint8))
            drawn.append(packer.draw_foreign(text_len, rng))
        else:
            pixels, owners = render_with_owners(scene, times)
            cells = find_cells(owners)
            drawn.append(packer.draw(scene, text_len, rng, greedy_text=greedy_text))
        frames.append(pixels)
        content.append(~cells.is_clear.reshape(-1))
        owner.append(cells.owner.reshape(-1))
        story.append(story_labels(scene, times, cells))
    return ClipBatch(
        frames=torch.from_numpy(np.concatenate(frames)),
        content=torch.from_numpy(np.stack(content)),
        owner=torch.from_numpy(np.stack(owner)),
        story={name: torch.from_numpy(np.stack([clip[name].reshape(-1) for clip in story])) for name in STORY_HEADS},
        text=packer.pack(drawn, text_len, instruction),
    )


def draw_num_frames(generator: torch.Generator) -> int:
    """The number of frames for all clips of a unit; half of the units have clips of 8 frames."""
    shares = torch.tensor([_SHARES[count] for count in FRAME_COUNTS])
    return FRAME_COUNTS[int(torch.multinomial(shares, 1, generator=generator))]


def draw_num_visual(num_frames: int, generator: torch.Generator) -> int:
    """The number of visual tokens for clips of more than 8 frames: usually few, since all of them take much longer."""
    is_thin = float(torch.rand(1, generator=generator)) < _THIN_SHARE
    return _THIN_TOKENS if is_thin else num_frames * CELLS


def make_pair_text(packer: ExamplePacker, seed: int, clips: range, text_len: int) -> PackedText | None:
    """Questions about each training clip and the next one; the last clip is followed by the first.

    None if a clip is foreign, or if no question was found for any pair: the mean loss of no answers is NaN.
    """
    scenes = [training_scene(seed, _FIRST_CLIP + index) for index in clips]
    if len(scenes) < 2 or any(map(is_foreign, scenes)):
        return None
    rng = np.random.default_rng([scenes[0].seed, 37])
    following = [*scenes[1:], scenes[0]]
    pairs = zip(scenes, following, strict=True)
    drawn = [packer.draw_pair(one, other, text_len, rng) for one, other in pairs]
    return packer.pack(drawn, text_len) if any(drawn) else None


def is_foreign(scene: Scene) -> bool:
    """Whether a foreign clip takes the place of this scene in training."""
    return bool(np.random.default_rng([scene.seed, 31]).random() < _FOREIGN_SHARE)


def training_scene(seed: int, number: int) -> Scene:
    """The scene of the clip with this number in the run with this seed."""
    return sample_scene(TRAIN_SEEDS.start + seed * _CLIPS_PER_RUN + number)


@dataclass(frozen=True, slots=True)
class Cells:
    """For each cell [T, 8, 8]: the id of its main owner, and whether the cell and its surroundings are empty."""

    owner: Labels  # 0 where nothing covers enough
    is_clear: NDArray[np.bool_]  # no pixel of any thing or letter
    is_strict_background: NDArray[np.bool_]  # nothing within 4 px


def find_cells(owners: NDArray[np.uint8]) -> Cells:
    """Reduce an owner map [T, 128, 128] to cells."""
    tiles = owners.reshape(len(owners), CELL_SIDE, CELL_PX, CELL_SIDE, CELL_PX).transpose(0, 1, 3, 2, 4)
    flat = tiles.reshape(len(owners), CELL_SIDE, CELL_SIDE, -1)
    best = np.zeros(flat.shape[:3], np.int64)
    cover = np.full(flat.shape[:3], _THING_COVER)
    for owner in np.unique(owners):
        if owner:
            share = (flat == owner).mean(axis=-1)
            wins = share > cover
            best[wins], cover[wins] = int(owner), share[wins]
    near = np.pad(owners > 0, ((0, 0), (_MARGIN_PX, _MARGIN_PX), (_MARGIN_PX, _MARGIN_PX)))
    wide = np.lib.stride_tricks.sliding_window_view(near, CELL_PX + 2 * _MARGIN_PX, axis=1)[:, ::CELL_PX].any(-1)
    wide = np.lib.stride_tricks.sliding_window_view(wide, CELL_PX + 2 * _MARGIN_PX, axis=2)[:, :, ::CELL_PX].any(-1)
    touched = np.asarray(flat.any(axis=-1))
    return Cells(owner=best, is_clear=~touched, is_strict_background=~np.asarray(wide))


def story_labels(scene: Scene, times: NDArray[np.float64], cells: Cells) -> dict[str, Labels]:
    """What a thing's late cells can tell about its past: labels [T, 8, 8] per head of STORY_HEADS.

    Only cells of the last two fifths of a thing's visible time are labelled: earlier ones cannot know.
    """
    labels = {name: np.full(cells.owner.shape, IGNORE, np.int64) for name in STORY_HEADS}
    for index, thing in enumerate(scene.things):
        late = times >= thing.visible_from + (thing.visible_to - thing.visible_from) * 0.6
        # Whether a thing will vanish is not known before the last frame.
        settled = late if thing.timing == "second-half" else late & (times > 0.9)
        mine = cells.owner == index + 1
        for name, value, known in (
            ("start", thing.start, late),
            ("direction", WORDS["direction"].index(thing.direction), late),
            ("timing", WORDS["timing"].index(thing.timing), settled),
            ("first_colour", WORDS["colour"].index(thing.colour), late),
        ):
            labels[name][mine & known[:, None, None]] = value
    return labels


def choose_tokens(content: torch.Tensor, num_kept: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers [C, K] of `num_kept` visual tokens per clip, ascending: those with content first, then random others."""
    if num_kept >= content.shape[1]:
        return torch.arange(content.shape[1]).expand(content.shape[0], -1)
    rank = torch.rand(content.shape, generator=generator) + content.float()
    return rank.topk(num_kept, dim=1).indices.sort(dim=1).values
