"""Unusual ways from conversation to prompt: continued, left open, without a template."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from jinja2 import UndefinedError
from tokenizers.processors import TemplateProcessing

from tests.unit.models.families.tiny_checkpoints import load
from vidspec_models.bundled import BUNDLED_DRAFT
from vidspec_models.errors import ContextOverflow, ConversationRefused
from vidspec_models.families.conversation import check_text_fits, tokenised
from vidspec_models.loading.checkpoint import load_processor
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec, model_path
from vidspec_models.request import DEFAULT_TEMPLATE, ChatTemplate, Turn
from vidspec_models.video_lm import VideoLM

pytestmark = pytest.mark.unit

ASK = Turn(role="user", parts=("What moves?",))
BEGUN = Turn(role="assistant", parts=("A red",))


@pytest.fixture(scope="module")
def model() -> VideoLM:
    return load_model(ModelSpec(path="bundled", role="draft", device="cpu"))


def text(model: VideoLM, *turns: Turn, template: ChatTemplate | None) -> str:
    ids = model.prepare(turns, [], template=template).ids
    decoded: str = model._processor.tokenizer.decode(ids, skip_special_tokens=False)
    return decoded


def test_the_last_turn_stays_open_if_it_is_continued(model: VideoLM) -> None:
    opened = text(model, ASK, template=DEFAULT_TEMPLATE)
    assert text(model, ASK, BEGUN, template=ChatTemplate(continue_final_message=True)) == f"{opened}A red"


def test_a_turn_of_which_the_template_leaves_a_part_out_cannot_be_continued(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    thought = Turn(role="assistant", parts=("A ball. </think> A red",))
    without = "{% for each in messages %}{{ each.content[0].text.split('</think>')[-1] }}{% endfor %}"
    monkeypatch.setattr(model._processor, "chat_template", without)
    with pytest.raises(ConversationRefused, match="last message"):
        text(model, ASK, thought, template=ChatTemplate(continue_final_message=True))
    assert text(model, ASK, BEGUN, template=ChatTemplate(continue_final_message=True)) == "What moves?A red"


def test_without_the_words_that_open_an_answer_the_prompt_ends_with_the_question(model: VideoLM) -> None:
    opened = text(model, ASK, template=DEFAULT_TEMPLATE)
    closed = text(model, ASK, template=ChatTemplate(add_generation_prompt=False))
    assert closed == opened.removesuffix("<|im_start|>assistant\n") != opened


def test_without_a_template_the_prompt_is_the_text_and_its_placeholders_are_letters(model: VideoLM) -> None:
    assert text(model, ASK, template=None) == "What moves?"
    assert "<video>" not in text(model, Turn(role="user", parts=("a <video> b",)), template=None)


def test_a_token_that_begins_every_text_is_there_once_whether_or_not_the_template_writes_it() -> None:
    processor = load_processor(model_path(ModelSpec(path="bundled", role="draft")), None)
    tokenizer, begin = processor.tokenizer, "<|im_start|>"
    tokenizer.bos_token = begin
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    for said in ("What moves?", f"{begin}What moves?"):
        ids = tokenised(processor, [Turn(role="user", parts=(said,))], [], None)
        assert tokenizer.decode(ids, skip_special_tokens=False) == f"{begin}What moves?"


_USERS = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% for part in message.content %}{{ '<video>' if part.type == 'video' else part.text }}{% endfor %}"
)


@pytest.mark.parametrize(
    "others",
    ["{{ '(' ~ message.content ~ ')' }}", "{{ '(' + message.content + ')' }}"],
    ids=["printed", "joined"],
)
def test_a_template_that_looks_for_parts_in_a_users_turns_alone_is_given_the_others_as_text(
    tmp_path: Path, others: str
) -> None:
    """A fine-tune's template may take every content without a video for a text: a list of parts would be printed."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_DRAFT, folder)
    (folder / "chat_template.jinja").write_text(f"{_USERS}{{% else %}}{others}{{% endif %}}{{% endfor %}}")
    processor = load_processor(str(folder), None)
    told = [Turn(role="system", parts=("Be <video> brief.",)), ASK, BEGUN, Turn(role="assistant", parts=()), ASK]
    ids = tokenised(processor, told, [], DEFAULT_TEMPLATE)
    assert processor.tokenizer.decode(ids) == "(Be < video> brief.)What moves?(A red)()What moves?"


def test_a_turn_without_words_is_an_empty_text(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a blank box for instructions: LLaVA-NeXT-Video's template reads the first part of a system turn."""
    first = "{{ messages[0].content[0].text ~ '|' }}"
    monkeypatch.setattr(model._processor, "chat_template", first)
    assert text(model, Turn(role="system", parts=()), ASK, template=DEFAULT_TEMPLATE) == "|"


def test_token_ids_are_the_prompt_as_they_are(model: VideoLM) -> None:
    tokenizer = model._processor.tokenizer
    for ids in (tokenizer("What moves?")["input_ids"], [5, 5, 5], [*model.stop_ids]):
        asked = [Turn(role="user", parts=(), token_ids=tuple(ids))]
        assert model.prepare(asked, [], template=None).ids == tuple(ids)


@pytest.mark.parametrize("kind", ["video_token", "image_token"])
def test_a_token_that_stands_for_a_video_is_refused_where_there_is_none(model: VideoLM, kind: str) -> None:
    token = model._processor.tokenizer.convert_tokens_to_ids(getattr(model._processor, kind))
    with pytest.raises(ConversationRefused, match=f"token {token} stands for a video"):
        model.prepare([Turn(role="user", parts=(), token_ids=(5, token))], [], template=None)


def test_a_token_that_the_model_has_no_weights_for_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    """As in a folder to whose tokenizer tokens were added, but not to its weights."""
    model = load("qwen3_vl", tmp_path)
    tokenizer, num_rows = model._processor.tokenizer, len(model.decoder.embedding)
    tokenizer.add_tokens([f"<late{number}>" for number in range(num_rows - len(tokenizer) + 1)])
    assert model.prepare([Turn(role="user", parts=(), token_ids=(num_rows - 1,))], [], template=None).num_tokens == 1
    for turn in (
        Turn(role="user", parts=(tokenizer.decode([num_rows]),)),
        Turn(role="user", parts=(), token_ids=(num_rows,)),
    ):
        with pytest.raises(ConversationRefused, match=f"has a token {num_rows}, but the model has no weights for it"):
            model.prepare([turn], [])


def test_a_switch_that_the_template_does_not_read_changes_nothing(model: VideoLM) -> None:
    switched = text(model, ASK, template=ChatTemplate(switches={"enable_thinking": False}))
    assert switched == text(model, ASK, template=DEFAULT_TEMPLATE)


@pytest.mark.parametrize(
    ("template", "error", "why"),
    [
        (
            "{{ raise_exception('Roles must alternate') }}",
            ConversationRefused,
            "refuses .*: Roles must alternate",
        ),
        ("{{ messages[0].nothing.at_all }}", UndefinedError, "no attribute"),
        ("{{ [1].index(2) }}", ValueError, "not in list"),
    ],
    ids=["refused", "mistaken", "mistaken in a value"],
)
def test_what_a_template_refuses_is_told_apart_from_its_own_mistakes(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch, template: str, error: type[Exception], why: str
) -> None:
    monkeypatch.setattr(model._processor, "chat_template", template)
    with pytest.raises(error, match=why):
        text(model, ASK, ASK, template=DEFAULT_TEMPLATE)


@pytest.mark.parametrize("parts", [("<vid", "eo>"), ("<", "imag", "e>")])
def test_words_that_only_together_stand_for_a_video_are_refused(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]
) -> None:
    joining = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(model._processor, "chat_template", joining)
    with pytest.raises(ConversationRefused, match="1 videos instead of 0"):
        text(model, Turn(role="user", parts=parts), template=DEFAULT_TEMPLATE)


class CountingTokenizer:
    """One token per character; counts the characters that it was given."""

    def __init__(self) -> None:
        self.num_seen = 0

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        self.num_seen += len(text)
        return {"input_ids": [0] * len(text)}


@pytest.mark.parametrize(("num_chars", "is_refused"), [(2000, False), (2001, True), (1_000_000, True)])
def test_a_text_of_far_too_many_tokens_is_refused_unread(num_chars: int, is_refused: bool) -> None:
    tokenizer = CountingTokenizer()
    turns = [Turn(role="user", parts=("x" * num_chars,))]
    with pytest.raises(ContextOverflow, match="shorten") if is_refused else nullcontext():
        check_text_fits(SimpleNamespace(tokenizer=tokenizer), turns, context_length=1000)
    assert tokenizer.num_seen <= 8192
    assert is_refused or not tokenizer.num_seen  # a text so short needs no counting


def test_as_many_tokens_as_pass_unread_pass_from_more_bytes() -> None:
    processor, turns = SimpleNamespace(tokenizer=CountingTokenizer()), [Turn(role="user", parts=("\u00e9" * 2000,))]
    check_text_fits(processor, turns, context_length=1000)
    with pytest.raises(ContextOverflow):
        check_text_fits(processor, turns, context_length=999)
