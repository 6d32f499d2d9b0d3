"""Attention targets of three heads: from each word to the same word in the question, from the conclusion to the words
found in this way, and from the text about an object to the cells that show it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.description import describe
from vidspec_models.bundled.render import OWNER_SIGN
from vidspec_models.bundled.scene import REGIONS, Scene, sample_scene
from vidspec_models.training import lookups
from vidspec_models.training.examples import EVERY_THING, IGNORE, ExamplePacker, PackedText, subject_spans
from vidspec_models.training.forward import make_layout
from vidspec_models.training.lookups import LookupLoss

pytestmark = pytest.mark.unit

ASKED = "Is there T? Seen: T near the start, F near the middle, none near the end, so yes."
NOT_ASKED = "Is it red? It is blue, so no."


SCENE = next(scene for scene in map(sample_scene, range(100)) if (len(scene.things), len(scene.signs)) == (2, 1))


@pytest.fixture(scope="module")
def packer(tokenizer: PreTrainedTokenizerFast) -> ExamplePacker:
    return ExamplePacker(tokenizer)


def pack(packer: ExamplePacker, *answers: str) -> PackedText:
    examples = [packer.example("?", answer) for answer in answers]
    return packer.pack([examples], sum(map(len, examples)))


def words(packer: ExamplePacker, text: PackedText, marked: torch.Tensor) -> list[str]:
    return [packer._tokenizer.decode([token]).strip() for token in text.ids[0][marked[0]].tolist()]


def test_words_look_for_their_like_in_what_was_asked_else_at_its_beginning(packer: ExamplePacker) -> None:
    text = pack(packer, ASKED, NOT_ASKED)
    looking = text.likeness != IGNORE
    found = text.ids[0][text.likeness[0][looking[0]]].tolist()
    pairs = list(zip(words(packer, text, looking), [packer._tokenizer.decode([t]).strip() for t in found], strict=True))
    assert pairs == [
        ("T", "T"), ("start", "I"), ("F", "I"), ("middle", "I"), ("none", "I"), ("end", "I"), ("blue", "I"),
    ]  # fmt: skip
    assert (text.segments[0][text.likeness[0][looking[0]]] == text.segments[0][looking[0]]).all()


def test_a_conclusion_looks_at_what_was_found_else_at_the_beginning(packer: ExamplePacker) -> None:
    text = pack(packer, ASKED, NOT_ASKED)
    assert words(packer, text, text.is_ground) == ["T", "I"]
    following = text.labels[text.concludes].tolist()
    assert [packer._tokenizer.decode([token]).strip() for token in following if token] == ["", "yes", "", "no"]


@pytest.mark.parametrize("answer", ["blue", "left, so yes.", "Is there a dog? Seen: the ring is red, so no."])
def test_nothing_is_told_of_answers_that_repeat_no_fact(packer: ExamplePacker, answer: str) -> None:
    text = pack(packer, answer)
    assert not (text.likeness != IGNORE).any()
    assert not text.concludes.any()


@pytest.mark.parametrize("tell", [caption, describe])
def test_what_is_told_of_somebody_looks_at_the_cells_that_show_it(
    packer: ExamplePacker, tell: Callable[[Scene], str]
) -> None:
    example = packer.example("?", tell(SCENE), is_caption=True)
    text = packer.pack([[example]], len(example))
    about = dict[int, list[str]]()
    for subject, label in zip(text.subject[0].tolist(), text.labels[0].tolist(), strict=True):
        about.setdefault(subject, []).extend([] if label == IGNORE else [packer._tokenizer.decode([label]).strip()])
    assert sorted(about) == [IGNORE, *([EVERY_THING] if tell is caption else []), 1, 2, OWNER_SIGN]
    for number, thing in enumerate(SCENE.things, 1):
        assert {thing.shape, thing.colour, thing.size} <= set(about[number])
        assert SCENE.things[number % 2].shape not in about[number]
    assert SCENE.signs[0].letter in about[OWNER_SIGN]
    if tell is caption:
        assert "two" in about[EVERY_THING]


def test_a_telling_is_settled_by_its_first_fact(packer: ExamplePacker) -> None:
    def settling(told: str) -> str:
        example = packer.example("?", told, is_caption=True)
        text = packer.pack([[example]], len(example))
        return str(packer._tokenizer.decode(text.labels[0][text.settles[0]]))

    assert all(f'"start":"{REGIONS[thing.start]}' in settling(describe(SCENE)) for thing in SCENE.things)
    assert "moves" not in settling(describe(SCENE))
    told = settling(caption(SCENE))
    assert "two objects" in told
    assert told.endswith(f"The letter {SCENE.signs[0].letter}")
    assert "at last" not in told


def test_every_scene_is_told_in_the_order_of_its_owners() -> None:
    for scene in map(sample_scene, range(300)):
        owners = [*range(1, len(scene.things) + 1), *range(OWNER_SIGN, OWNER_SIGN + len(scene.signs))]
        assert [subject for *_, subject in subject_spans(caption(scene))] == [EVERY_THING, *owners]
        assert [subject for *_, subject in subject_spans(describe(scene))] == owners


def test_the_loss_is_nothing_where_both_look_right_and_much_where_not(
    packer: ExamplePacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = packer.example("?", caption(SCENE), is_caption=True)
    examples = [*(packer.example("?", answer) for answer in (ASKED, NOT_ASKED)), told]
    text = packer.pack([examples], sum(map(len, examples)))
    owners = torch.tensor([[0, 1, 2, OWNER_SIGN]])
    layout = make_layout(torch.arange(4)[None], 4, text)
    start, size = layout.text.start, layout.segments.shape[1]
    right = torch.full((1, size, size), -20.0)
    for row, column in enumerate(text.likeness[0].tolist()):
        if column != IGNORE:
            right[0, start + row, start + column] = 0.0
    grounds = text.is_ground[0].nonzero()[:, 0].tolist()
    for row in text.concludes[0].nonzero()[:, 0].tolist():
        right[0, start + row, start + grounds[int(text.segments[0, row]) - 1]] = 0.0
    for row, subject in enumerate(text.subject[0].tolist()):
        for number, owner in enumerate(owners[0].tolist()):
            if subject == owner or (subject == EVERY_THING and owner in (1, 2)):
                right[0, start + row, layout.visual.start + number] = 0.0
    for attention, low, high in ((right, 0.0, 1e-3), (right.roll(1, -1), 40.0, 70.0)):
        monkeypatch.setattr(lookups, "_log_attention", lambda *_, attention=attention: attention)
        loss = LookupLoss(layout, text, owners)
        mask = torch.zeros(1)
        for number in range(1, 9):
            assert loss.next_mask(number, None, mask, mask, (mask, mask)) is mask
        assert low <= float(loss.value) <= high
