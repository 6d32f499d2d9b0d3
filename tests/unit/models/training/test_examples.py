"""Examples: each equals a single chat, and is labelled with its own next tokens."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.render import render_with_owners, slot_times
from vidspec_models.bundled.scene import sample_scene
from vidspec_models.training.architecture import NUM_VISUAL
from vidspec_models.training.examples import (
    IGNORE,
    TEXT_ONLY,
    ExamplePacker,
    PackedText,
    choose_tokens,
    find_cells,
    is_foreign,
    make_clip_batch,
    make_pair_text,
    training_scene,
)


def _packed(packer: ExamplePacker, seed: int, length: int, *, greedy_text: bool = False) -> PackedText:
    drawn = packer.draw(sample_scene(seed), length, np.random.default_rng(2), greedy_text=greedy_text)
    return packer.pack([drawn], length)


def test_a_packed_example_is_the_chat_template_of_a_single_question(tokenizer: PreTrainedTokenizerFast) -> None:
    packer, told = ExamplePacker(tokenizer), caption(sample_scene(5))
    packed = packer.pack([[packer.example("What happens?", told, is_caption=True), packer.example("Why?", "no")]], 200)
    first = packed.segments[0] == 1
    content = [{"type": "video"}, {"type": "text", "text": "What happens?"}]
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": told}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    video = tokenizer.convert_tokens_to_ids("<video>")
    assert tokenizer(rendered).input_ids == [*packer.prefix, video, *packed.ids[0, first].tolist()]
    assert packed.positions[0, first].tolist() == list(range(int(first.sum())))


def test_questions_that_follow_up_are_the_chat_template_of_their_conversation(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    packer = ExamplePacker(tokenizer)
    said = [("Is it red?", "no"), ("Which colour is it?", "green"), ("What moves?", "none")]
    told = [packer.example(*said[0]), *(packer.example(*each, follows=True) for each in said[1:])]
    packed = packer.pack([[*told, packer.example("Is it blue?", "no")]], 120)
    mine = packed.segments[0] == 1
    chat: list[dict[str, object]] = []
    for asked, answer in said:
        content: list[dict[str, str]] = [{"type": "text", "text": asked}]
        chat += [{"role": "user", "content": content if chat else [{"type": "video"}, *content]}]
        chat += [{"role": "assistant", "content": answer}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    video = tokenizer.convert_tokens_to_ids("<video>")
    assert tokenizer(rendered).input_ids == [*packer.prefix, video, *packed.ids[0, mine].tolist()]
    assert packed.positions[0, mine].tolist() == list(range(int(mine.sum())))
    other = packed.segments[0] == 2
    assert packed.positions[0, other].tolist() == list(range(int(other.sum())))


def test_an_instruction_is_the_chat_template_of_a_system_message(tokenizer: PreTrainedTokenizerFast) -> None:
    packer = ExamplePacker(tokenizer)
    packed = packer.pack([[packer.example("Is it red?", "no")]] * 2, 60, "You see a short clip. Be precise.")
    content = [{"type": "video"}, {"type": "text", "text": "Is it red?"}]
    chat = [
        {"role": "system", "content": "You see a short clip. Be precise."},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "no"},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    video = tokenizer.convert_tokens_to_ids("<video>")
    for prefix, ids, segments in zip(packed.prefix, packed.ids, packed.segments, strict=True):
        assert tokenizer(rendered).input_ids == [*prefix.tolist(), video, *ids[segments == 1].tolist()]


def test_clips_with_an_instruction_are_as_long_as_others(tokenizer: PreTrainedTokenizerFast) -> None:
    packer = ExamplePacker(tokenizer)
    texts = [make_clip_batch(packer, 0, range(number, number + 1), 256).text for number in range(12)]
    assert {text.prefix.shape[1] + text.ids.shape[1] for text in texts} == {len(packer.prefix) + 256}
    assert len({text.prefix.shape[1] for text in texts}) > 2


def test_what_is_drawn_has_follow_ups_whose_conversation_sees_the_video(tokenizer: PreTrainedTokenizerFast) -> None:
    packer, rng = ExamplePacker(tokenizer), np.random.default_rng(3)
    drawn = [packer.draw(sample_scene(seed), 320, rng) for seed in range(30)]
    assert all(sum(map(len, clip)) <= 320 and not clip[0].follows for clip in drawn)
    follow_ups = [(before, each) for clip in drawn for before, each in itertools.pairwise(clip) if each.follows]
    assert all(before.sees_video and each.sees_video for before, each in follow_ups)
    assert any(each.is_caption for _, each in follow_ups)
    assert any(before.is_caption for before, _ in follow_ups)


def test_a_long_answer_is_also_begun_after_questions_and_nothing_follows_up_on_its_first_words(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    packer, rng = ExamplePacker(tokenizer, long_share=0.0), np.random.default_rng(4)
    drawn = [packer.draw(sample_scene(seed), 320, rng) for seed in range(30)]
    beginnings = [
        (at, clip) for clip in drawn for at, each in enumerate(clip) if tokenizer.eos_token_id != each.answer[-1]
    ]
    assert sum(clip[at].follows for at, clip in beginnings) > 20
    assert not any(follower.follows for at, clip in beginnings for follower in clip[at + 1 : at + 2])
    said = {tokenizer.decode(clip[at].answer) for at, clip in beginnings}
    assert {text.split()[0] for text in said} >= {"Everything", "The"}
    assert any(text.startswith("{") for text in said)
    assert max(len(clip[at].answer) for at, clip in beginnings) <= 5


def test_labels_are_the_next_token_of_the_same_example(tokenizer: PreTrainedTokenizerFast) -> None:
    packed = _packed(ExamplePacker(tokenizer), 8, 480)
    labelled = (packed.labels[0] != IGNORE).nonzero()[:, 0]
    assert torch.equal(packed.labels[0, labelled], packed.ids[0, labelled + 1])
    assert torch.equal(packed.examples[0, labelled], packed.examples[0, labelled + 1])
    assert (packed.weights[0, labelled] > 0).all()
    assert len(packed.examples.unique()) > 4


def test_a_second_long_answer_mostly_follows_up_on_the_first(tokenizer: PreTrainedTokenizerFast) -> None:
    drawn = [ExamplePacker(tokenizer).draw(sample_scene(seed), 384, np.random.default_rng(seed)) for seed in range(40)]
    long = [[example for example in clip if example.is_caption] for clip in drawn]
    assert {len(clip) for clip in long} == {1, 2}
    follows = [clip[1].follows for clip in long if len(clip) == 2]
    assert len(follows) / 2 < sum(follows) < len(follows)


def test_the_first_words_of_a_caption_weigh_more_after_a_question(tokenizer: PreTrainedTokenizerFast) -> None:
    packer, scene = ExamplePacker(tokenizer), sample_scene(1)
    asked, told = packer.example("Is it red?", "no"), ("Describe the video.", caption(scene))
    alone, after = (
        packer.pack([[asked, packer.example(*told, is_caption=True, follows=follows)]], 200)
        for follows in (False, True)
    )
    alone_weights, after_weights = (each.weights[0, each.is_caption[0]] for each in (alone, after))
    assert (after_weights[:4] > alone_weights[:4]).all()
    assert torch.equal(after_weights[4:], alone_weights[4:])


def test_chosen_tokens_keep_content_first_and_order() -> None:
    content = torch.zeros(2, NUM_VISUAL, dtype=torch.bool)
    content[:, 100:140] = True
    kept = choose_tokens(content, 64, torch.Generator().manual_seed(0))
    assert content.gather(1, kept).sum() == 80
    assert (kept.diff(dim=1) > 0).all()


def test_strict_background_cells_keep_their_distance() -> None:
    for seed in range(20):
        _, owners = render_with_owners(sample_scene(seed), slot_times())
        cells = find_cells(owners)
        assert not (cells.is_strict_background & ~cells.is_clear).any()
        for t, row, column in np.argwhere(cells.is_strict_background)[::37]:
            y, x = row * 16, column * 16
            assert not owners[t, max(y - 4, 0) : y + 20, max(x - 4, 0) : x + 20].any()


def test_a_text_only_example_is_the_chat_template_of_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    packer = ExamplePacker(tokenizer)
    packed = packer.pack([[packer.example("Hello there!", "no", sees_video=False)]], 40)
    mine = packed.segments[0] == TEXT_ONLY + 1
    chat = [{"role": "user", "content": "Hello there!"}, {"role": "assistant", "content": "no"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer(rendered).input_ids == packed.ids[0, mine].tolist()
    assert packed.positions[0, mine][0] == 0


def test_questions_about_two_clips_say_which_of_them(tokenizer: PreTrainedTokenizerFast) -> None:
    packer = ExamplePacker(tokenizer)
    first = next(n for n in range(100) if not any(is_foreign(training_scene(0, 50_000_000 + n + k)) for k in (0, 1)))
    text = make_pair_text(packer, 0, range(first, first + 2), 96)
    assert text is not None
    answers = text.ids[0][text.labels[0].roll(1) != IGNORE]
    assert set(tokenizer.decode(answers, skip_special_tokens=True).replace("second", "first").split("first")) == {""}


def test_where_chance_finds_nothing_to_ask_of_two_clips_there_is_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    alike = 60_010_110  # a small purple circle and an E, as in the next clip
    assert not any(is_foreign(training_scene(0, 50_000_000 + alike + k)) for k in (0, 1))
    assert make_pair_text(ExamplePacker(tokenizer), 0, range(alike, alike + 2), 96) is None
