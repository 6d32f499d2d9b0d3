"""A conversation as text and token ids, through the checkpoint's own template (and its tools, if it reads them)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.errors import ContextOverflow, ConversationRefused
from vidspec_models.request import DEFAULT_TEMPLATE, END_THINK, THINK, VIDEO, ChatTemplate, Reasoning, ToolFormat, Turn

_LAST = 8  # ids of a prompt that may be `<think>` and white space
_COUNTED = 8192  # characters per piece when tokens are counted
_SAID = "Hello."


def conversation(processor: Any, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns in the structure that transformers' chat templates read, with parts in their order.

    A template may still put videos before text: those of LLaVA-OneVision and of the bundled pair do.
    """
    return [
        {
            "role": turn.role,
            "content": _content(processor, turn),
            **_about_tools(processor, turn),
            **({"reasoning_content": _without_placeholders(processor, turn.reasoning)} if turn.reasoning else {}),
        }
        for turn in turns
    ]


def _content(processor: Any, turn: Turn) -> str | list[dict[str, str]]:
    """A turn that says nothing has an empty text; none if it calls tools, since templates take any part for words."""
    if turn.role in getattr(processor, "roles_of_texts", ()):
        return _without_placeholders(processor, turn.text)
    parts = turn.parts or (() if turn.tool_calls else ("",))
    return [
        {"type": "video"} if part is VIDEO else {"type": "text", "text": _without_placeholders(processor, part)}
        for part in parts
    ]


def roles_of_texts(processor: Any) -> frozenset[str]:
    """The roles for whose turns a template wants texts: it looks for parts in a user's turns alone, where videos are.

    A list of parts would be printed as Python's, or be an error.
    """
    asked = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}

    def shows(role: str, content: str | list[dict[str, str]]) -> bool:
        said = {"role": role, "content": content}
        with suppress(Exception):  # a template can contain any code
            text = processor.apply_chat_template([said, asked] if role == "system" else [asked, said], tokenize=False)
            return _SAID in text and repr(_SAID) not in text
        return False

    roles = ("system", "assistant", "tool")
    return frozenset(
        each for each in roles if not shows(each, [{"type": "text", "text": _SAID}]) and shows(each, _SAID)
    )


def _without_placeholders(processor: Any, text: str) -> str:
    """A user may write "<video>" as plain text: a space inserted into it keeps it from standing for frames."""
    for token in (processor.video_token, processor.image_token):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _about_tools(processor: Any, turn: Turn) -> dict[str, Any]:
    """Further fields of a turn about tools: its calls, with arguments as objects, or the call whose result it is."""
    fields: dict[str, Any] = {}
    if turn.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": call.call_id,
                "function": {"name": call.name, "arguments": _as_object(processor, call.arguments)},
            }
            for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        fields["tool_call_id"] = turn.tool_call_id
    return fields


def _as_object(processor: Any, text: str) -> Any:
    """The parsed JSON of a tool or of a call's arguments. Placeholders are broken up where no escape can hide them.

    Half a surrogate pair, as in an emoji cut in two, becomes U+FFFD: JSON can escape it, but no tokenizer accepts it.
    """
    plain = json.dumps(json.loads(text), ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(_without_placeholders(processor, plain.decode("utf-16", "replace")))


def tokenised(
    processor: Any, turns: Sequence[Turn], videos: Sequence[EncodedVideo], template: ChatTemplate | None
) -> Tensor:
    """Token ids [P] of a conversation with the videos' placeholder texts; without a template, of the plain text.

    Ids that a prompt consists of are returned unchanged. Raises ConversationRefused.
    """
    if ids := [token for turn in turns for token in turn.token_ids]:
        placeholders = processor.tokenizer.convert_tokens_to_ids([processor.video_token, processor.image_token])
        if found := set(placeholders).intersection(ids):
            raise ConversationRefused(f"token {min(found)} stands for a video or an image, but the prompt has none")
        return torch.tensor(ids, dtype=torch.int64)
    if template is None:
        text = "".join(_without_placeholders(processor, turn.text) for turn in turns)
    else:
        text = _rendered(processor, turns, template)
    if (count := sum(map(text.count, (processor.video_token, processor.image_token)))) != len(videos):
        raise ConversationRefused(
            f"the prompt has placeholders for {count} videos instead of {len(videos)}: successive texts together make "
            "one, or the chat template leaves one out"
        )
    replacements = [video.placeholder_text for video in videos]
    (text,), _ = processor.get_text_with_replacements([text], videos_replacements=replacements)
    bos = processor.tokenizer.bos_token
    has_bos = bos is not None and text.startswith(bos)
    # The tokenizer's own conversion to a tensor takes three times as long.
    return torch.tensor(processor.tokenizer(text, add_special_tokens=not has_bos)["input_ids"], dtype=torch.int64)


def _rendered(processor: Any, turns: Sequence[Turn], template: ChatTemplate) -> str:
    try:
        text: str = processor.apply_chat_template(
            conversation(processor, turns),
            add_generation_prompt=template.add_generation_prompt and not template.continue_final_message,
            continue_final_message=template.continue_final_message,
            tokenize=False,
            tools=[_as_object(processor, tool) for tool in template.tools] or None,
            **template.switches,
        )
    except TemplateError as error:
        if type(error) is not TemplateError:  # what templates raise themselves; others are the template's own mistakes
            raise
        raise ConversationRefused(f"the model's chat template refuses the conversation: {error}") from error
    except RecursionError as error:
        raise ConversationRefused("the arguments of a tool call are nested too deeply") from error
    except ValueError as error:
        if not template.continue_final_message:
            raise
        raise ConversationRefused("the chat template changes the last message: it cannot be continued") from error
    return text


def check_text_fits(processor: Any, turns: Sequence[Turn], context_length: int) -> None:
    """Raise ContextOverflow for texts with far more tokens than the context, without tokenising all of the text.

    A token has at least one byte, so short texts pass at once. Others are counted in pieces, and each cut may add a few
    tokens: so only more than twice the context is refused here.
    """
    texts = [turn.text for turn in turns]
    most = 2 * context_length
    if sum(len(text.encode()) for text in texts) <= most:
        return
    count = 0
    for text in texts:
        for start in range(0, len(text), _COUNTED):
            piece = text[start : start + _COUNTED]
            count += len(processor.tokenizer(piece, add_special_tokens=False)["input_ids"])
            if count > most:
                raise ContextOverflow(
                    f"the prompt has more than {most} tokens, but the model's context is {context_length}; "
                    "shorten the prompt"
                )


def reasoning_of(processor: Any, ids: Sequence[int], continues: str = "") -> Reasoning:
    """How an answer to a prompt with these ids, which the chat template has made, tells what the model thinks.

    `continues` is the message that the answer continues, if it does: it may have ended within a thought.

    Special tokens are not in an answer's text: tags that are some cannot be found there.
    """
    tokenizer = processor.tokenizer
    added = tokenizer.added_tokens_decoder
    unseen = (None, tokenizer.unk_token_id, *(token for token, text in added.items() if text.special))
    if any(tokenizer.convert_tokens_to_ids(tag) in unseen for tag in (THINK, END_THINK)):
        return Reasoning.NONE
    end = tokenizer.decode(ids[-_LAST:], skip_special_tokens=False)
    is_open = end.rstrip().endswith(THINK) or continues.rfind(THINK) > continues.rfind(END_THINK)
    return Reasoning.OPEN if is_open else Reasoning.TAGGED


def opens_reasoning(processor: Any) -> bool:
    """Whether prompts end with `<think>`, unless a request's template switches say otherwise."""
    try:
        ids = tokenised(processor, [Turn(role="user", parts=("?",))], [], DEFAULT_TEMPLATE)
    except ConversationRefused:
        return False
    return reasoning_of(processor, ids.tolist()) is Reasoning.OPEN


def tool_format(processor: Any) -> ToolFormat:
    """How a checkpoint's chat template handles tools.

    Templates do not declare the format of tool calls. In the Hermes format a call is a JSON object with a name and
    `arguments` between the tokens `<tool_call>` and `</tool_call>`; Qwen's coders write `<function=...>` between the
    same tokens. Whether a model thinks first must be known from the prompt: a grammar allows `<think>` or does not.
    """
    template, vocabulary = processor.chat_template, processor.tokenizer.get_vocab()
    if not isinstance(template, str) or "tools" not in template:
        return ToolFormat.NONE
    has_tags = all(tag in template and tag in vocabulary for tag in ("<tool_call>", "</tool_call>"))
    is_hermes = has_tags and "arguments" in template and "<function=" not in template
    is_certain = THINK not in template or opens_reasoning(processor)
    return ToolFormat.HERMES if is_hermes and is_certain else ToolFormat.OTHER
