"""Further fields that clients of OpenAI's API and of vLLM send: accepted where they do not change the answer.

There are three kinds. *Inert* fields never change the text here, whatever their value: labels, hints, who asks.
*Neutral* fields would change it: the value that means *as usual* is accepted, any other is a 400 that says why. All
other fields are refused, as OpenAI's own server does (vLLM's ignores them): a mistyped option must not go unnoticed.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from vidspec_models.request import ChatTemplate
from vidspec_service.api.schemas.fields import Count, CountOrZero, Fps, MessageText, Seed, Strict


def inert(because: str = "") -> Any:
    """An inert field."""
    return Field(None, description=f"Accepted; has no effect{': ' if because else ''}{because}.")


def neutral(value: object, because: str, *others: object) -> Any:
    """A neutral field: any value but None, `value` and `others` is refused with `because`."""
    taken = [(each, isinstance(each, bool)) for each in (None, value, *others)]  # in Python False equals 0

    def check(given: object) -> object:
        if (given, isinstance(given, bool)) not in taken:
            raise ValueError(because)
        return given

    accepted = " and ".join(map(_shown, (value, *others)))
    field: Any = Field(None, description=f"Only {accepted} {'are' if others else 'is'} accepted.")
    field.metadata.append(BeforeValidator(check))
    return field


def _shown(value: object) -> str:
    if value in ("", [], {}):
        return "an empty value"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if value is None or type(value) is int else f"`{text}`"


def _minus_one_means(meant: int | None) -> BeforeValidator:
    return BeforeValidator(lambda value: meant if value == -1 and type(value) is int else value)


_NO_TOOLS = "this older field is not supported; use tools and tool_choice"

Label = Annotated[str, StringConstraints(max_length=512)]
Nothing = Annotated[list[Any], Field(max_length=0)]


class VideoKwargs(Strict):
    """Which frames of a video, in vLLM's words: with both, `fps`, but at most `num_frames`."""

    fps: Annotated[Fps | None, _minus_one_means(None)] = Field(None, description="Frames per second; -1: not given.")
    num_frames: Annotated[Count | None, _minus_one_means(None)] = Field(
        None, description="Number of evenly sampled frames; -1: not given."
    )


class ProcessorKwargs(VideoKwargs):
    """Options of a checkpoint's processor."""

    do_sample_frames: Literal[True] | None = neutral(True, "a client's own frames are sent as data:video/jpeg")


class MediaKwargs(Strict):
    """How media are read."""

    video: VideoKwargs | None = None


class TemplateSwitches(Strict):
    """Variables that chat templates of released models read; a template that does not read one ignores it."""

    add_vision_id: bool | None = Field(None, description="For Qwen's templates: number the videos of a conversation.")
    enable_thinking: bool | None = Field(None, description="For templates that can start a section of reasoning.")


class TemplateFields(Strict):
    """How the conversation becomes a prompt; names and meanings are vLLM's."""

    add_generation_prompt: bool | None = Field(
        None, description="Open the assistant's turn after the last message; false leaves that to the model."
    )
    continue_final_message: bool | None = Field(
        None, description="The last message is the assistant's, and the answer continues it."
    )
    chat_template_kwargs: TemplateSwitches | None = Field(
        None, description="Variables for the checkpoint's chat template."
    )

    @property
    def template(self) -> ChatTemplate:
        """The template's arguments, for the engine."""
        given = {} if self.chat_template_kwargs is None else self.chat_template_kwargs.model_dump(exclude_none=True)
        return ChatTemplate(
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            switches=given,
        )


class ClientFields(Strict):
    """Base of request bodies; list it before their other bases, whose `seed` and `top_k` it overrides."""

    # Inert: any value is accepted, as each release of OpenAI's client has new ones
    user: Label | None = inert()
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = inert()
    service_tier: Label | None = inert()
    reasoning_effort: Label | None = inert("models here have no levels of reasoning")
    verbosity: Label | None = inert("ask for a length in the prompt")
    prompt_cache_key: Label | None = inert()
    prompt_cache_retention: Label | None = inert()
    prompt_cache_options: dict[Label, Any] | None = inert()
    safety_identifier: Label | None = inert()
    spaces_between_special_tokens: bool | None = inert("special tokens are never shown")
    guided_decoding_backend: Label | None = inert("there is one implementation of structured output")
    request_id: Label | None = inert("the log has the header X-Request-Id")

    # Neutral
    store: Literal[False] | None = neutral(False, "this server does not store answers")
    modalities: list[Literal["text"]] | None = neutral(["text"], "this server answers with text only")
    moderation: None = neutral(None, "this server does not moderate")
    functions: Nothing | None = neutral([], _NO_TOOLS)
    function_call: Literal["none", "auto"] | None = neutral("none", _NO_TOOLS, "auto")
    best_of: Literal[1] | None = neutral(1, "this server does not select the best of several answers")
    use_beam_search: Literal[False] | None = neutral(False, "this server has no beam search")
    length_penalty: float | None = neutral(1, "it applies to beam search, which this server does not have")
    skip_special_tokens: Literal[True] | None = neutral(True, "answers never contain special tokens")
    include_stop_str_in_output: Literal[False] | None = neutral(
        False, "answers never include the string that ends them"
    )
    return_token_ids: Literal[False] | None = neutral(False, "answers have no token ids; POST /tokenize returns them")
    return_tokens_as_token_ids: Literal[False] | None = neutral(False, "tokens are returned as text")
    echo: Literal[False] | None = neutral(
        False, "this server does not repeat the prompt, nor tell log probabilities of its tokens"
    )
    documents: Nothing | None = neutral([], "put documents into the messages")
    priority: Literal[0] | None = neutral(0, "this server has no priorities: callers are served in turn")

    include_reasoning: bool | None = Field(None, description="false: leave out what the model thought.")

    # vLLM's clients send -1 for "not given"
    seed: Annotated[Seed | None, _minus_one_means(None)] = Field(
        None, description="The same request and seed give the same text; random if not given, or -1."
    )
    top_k: Annotated[CountOrZero | None, _minus_one_means(0)] = Field(
        None, description="Sample from the k most likely tokens only; 0 and -1 turn it off."
    )


class Markable(Strict):
    """Base of what clients of Anthropic's models mark as worth keeping; LiteLLM passes the marks on to any model."""

    cache_control: dict[Label, Any] | None = inert("beginnings of prompts are kept by themselves")


class PartFields(Markable):
    """Base of the parts of a message."""

    prompt_cache_breakpoint: dict[Label, Any] | None = inert("beginnings of prompts are kept by themselves")


class MediaFields(PartFields):
    """Base of parts that vLLM has as well."""

    uuid: Label | None = inert("a video or image is known again by its content")


class MessageFields(Markable):
    """Base of messages: the fields of OpenAI's and vLLM's messages, so that answers can be sent back unchanged."""

    name: Annotated[str, StringConstraints(max_length=64)] | None = inert("templates do not use it")
    refusal: None = Field(None, description="Only null is accepted.")
    audio: None = Field(None, description="Only null is accepted.")
    function_call: None = Field(None, description="Only null is accepted.")
    annotations: Nothing | None = neutral([], "answers of this server have no annotations")
    reasoning: MessageText | None = Field(
        None, description="In an assistant's turn: what it thought, for the chat template."
    )
    reasoning_content: MessageText | None = Field(None, description="The same as `reasoning`.")
    provider_specific_fields: dict[str, Any] | None = inert("it is LiteLLM's")
    thinking_blocks: list[Any] | None = inert("it is LiteLLM's; `reasoning_content` has the text")
