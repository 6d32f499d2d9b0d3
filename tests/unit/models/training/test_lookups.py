"""Where two heads are told to look: from what is seen to what was asked, from what follows to what was found."""

from __future__ import annotations

import pytest
import torch

from vidspec_models.training import lookups
from vidspec_models.training.examples import IGNORE, ExamplePacker, PackedText
from vidspec_models.training.forward import make_layout
from vidspec_models.training.lookups import LookupLoss
from vidspec_models.training.tokenizer import build_tokenizer

pytestmark = pytest.mark.unit

ASKED = "Is there T? Seen: T near the start, F near the middle, none near the end, so yes."
NOT_ASKED = "Is it red? It is blue, so no."


@pytest.fixture(scope="module")
def packer() -> ExamplePacker:
    return ExamplePacker(build_tokenizer())


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


def test_the_loss_is_nothing_where_both_look_right_and_much_where_not(
    packer: ExamplePacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = pack(packer, ASKED, NOT_ASKED)
    keep = torch.arange(4)[None]
    layout = make_layout(torch.tensor(packer.prefix), keep, 4, text)
    start, size = layout.text.start, layout.segments.shape[1]
    right = torch.full((1, size, size), -20.0)
    for row, column in enumerate(text.likeness[0].tolist()):
        if column != IGNORE:
            right[0, start + row, start + column] = 0.0
    grounds = text.is_ground[0].nonzero()[:, 0].tolist()
    for row in text.concludes[0].nonzero()[:, 0].tolist():
        right[0, start + row, start + grounds[int(text.segments[0, row]) - 1]] = 0.0
    for attention, low, high in ((right, 0.0, 1e-3), (right.roll(1, -1), 30.0, 50.0)):
        monkeypatch.setattr(lookups, "_log_attention", lambda *_, attention=attention: attention)
        loss = LookupLoss(layout, text)
        mask = torch.zeros(1)
        for number in range(1, 9):
            assert loss.next_mask(number, None, mask, mask, (mask, mask)) is mask
        assert low <= float(loss.value) <= high
