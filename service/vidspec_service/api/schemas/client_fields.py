"""Further fields that clients of OpenAI's API and of vLLM send: accepted where they do not change the answer.

There are three kinds. *Inert* fields never change the text here, whatever their value: labels, hints, who asks.
*Neutral* fields would change it: the value that means *as usual* is accepted, any other is a 400 that says why. All
other fields are refused, as OpenAI's own server does (vLLM's ignores them): a mistyped option must not go unnoticed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from vidspec_models.request import ChatTemplate
from vidspec_service.api.schemas.fields import Strict

_INERT = "Accepted; has no effect."


def only(neutral: object, because: str, *others: object) -> BeforeValidator:
    """Validator of a neutral field: None, `neutral` and `others` pass; any other value is refused with `because`."""
    taken = [(each, isinstance(each, bool)) for each in (None, neutral, *others)]  # in Python False equals 0

    def check(value: object) -> object:
        if (value, isinstance(value, bool)) not in taken:
            raise ValueError(because)
        return value

    return BeforeValidator(check)


def _minus_one_means(meant: int | None) -> BeforeValidator:
    return BeforeValidator(lambda value: meant if value == -1 and type(value) is int else value)


_NO_LOGPROBS = "for log probabilities use /v1/chat/completions"
_NO_TOOLS = "this older field is not supported; use tools and tool_choice"

Label = Annotated[str, StringConstraints(max_length=512)]
Nothing = Annotated[list[Any], Field(max_length=0)]
NoLogprobs = Annotated[Literal[False] | None, only(False, _NO_LOGPROBS)]
NoTopLogprobs = Annotated[Literal[0] | None, only(0, _NO_LOGPROBS)]
NoOptions = Annotated[dict[str, Any], Field(max_length=0)]
NoProcessing = Annotated[
    NoOptions | None,
    only({}, "frames are chosen by num_frames, fps, max_frames, start_s and end_s"),
]


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
    user: Label | None = Field(None, description=_INERT)
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = Field(None, description=_INERT)
    service_tier: Label | None = Field(None, description=_INERT)
    reasoning_effort: Label | None = Field(
        None, description="Accepted; has no effect: models here have no levels of reasoning."
    )
    verbosity: Label | None = Field(None, description="Accepted; has no effect: ask for a length in the prompt.")
    prompt_cache_key: Label | None = Field(None, description=_INERT)
    prompt_cache_retention: Label | None = Field(None, description=_INERT)
    prompt_cache_options: dict[Label, Any] | None = Field(None, description=_INERT)
    safety_identifier: Label | None = Field(None, description=_INERT)
    include_reasoning: bool | None = Field(
        None, description="Accepted; has no effect: reasoning is not returned separately."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="Accepted; has no effect: special tokens are never shown."
    )
    guided_decoding_backend: Label | None = Field(
        None, description="Accepted; has no effect: there is one implementation of structured output."
    )
    request_id: Label | None = Field(None, description="Accepted; has no effect: the log has the header X-Request-Id.")

    # Neutral
    store: Annotated[Literal[False] | None, only(False, "this server does not store answers")] = Field(
        None, description="Only `false` is accepted."
    )
    modalities: Annotated[list[Literal["text"]] | None, only(["text"], "this server answers with text only")] = Field(
        None, description='Only `["text"]` is accepted.'
    )
    functions: Annotated[Nothing | None, only([], _NO_TOOLS)] = Field(
        None, description="Only an empty value is accepted."
    )
    function_call: Annotated[Literal["none", "auto"] | None, only("none", _NO_TOOLS, "auto")] = Field(
        None, description="Only `none` and `auto` are accepted."
    )
    best_of: Annotated[Literal[1] | None, only(1, "this server does not select the best of several answers")] = Field(
        None, description="Only 1 is accepted."
    )
    use_beam_search: Annotated[Literal[False] | None, only(False, "this server has no beam search")] = Field(
        None, description="Only `false` is accepted."
    )
    length_penalty: Annotated[float | None, only(1, "it applies to beam search, which this server does not have")] = (
        Field(None, description="Only 1 is accepted.")
    )
    skip_special_tokens: Annotated[Literal[True] | None, only(True, "answers never contain special tokens")] = Field(
        None, description="Only `true` is accepted."
    )
    include_stop_str_in_output: Annotated[
        Literal[False] | None, only(False, "answers never include the string that ends them")
    ] = Field(None, description="Only `false` is accepted.")
    return_token_ids: Annotated[
        Literal[False] | None, only(False, "answers have no token ids; POST /tokenize returns them")
    ] = Field(None, description="Only `false` is accepted.")
    return_tokens_as_token_ids: Annotated[Literal[False] | None, only(False, "tokens are returned as text")] = Field(
        None, description="Only `false` is accepted."
    )
    echo: Annotated[Literal[False] | None, only(False, "this server does not repeat the prompt")] = Field(
        None, description="Only `false` is accepted."
    )
    documents: Annotated[Nothing | None, only([], "put documents into the messages")] = Field(
        None, description="Only an empty value is accepted."
    )
    priority: Annotated[Literal[0] | None, only(0, "this server has no priorities: callers are served in turn")] = (
        Field(None, description="Only 0 is accepted.")
    )
    mm_processor_kwargs: NoProcessing = Field(None, description="Only an empty value is accepted.")
    media_io_kwargs: NoProcessing = Field(None, description="Only an empty value is accepted.")

    # vLLM's clients send -1 for "not given"
    seed: Annotated[int | None, Field(ge=0, le=2**64 - 1), _minus_one_means(None)] = Field(
        None, description="The same request and seed give the same text; random if not given, or -1."
    )
    top_k: Annotated[int | None, Field(ge=0, le=2**31 - 1), _minus_one_means(0)] = Field(
        None, description="Sample from the k most likely tokens only; 0 and -1 turn it off."
    )


class TurnFields(Strict):
    """Base of messages: the fields of OpenAI's and vLLM's messages, so that answers can be sent back unchanged."""

    name: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        None, description="Accepted; has no effect: templates do not use it."
    )
    refusal: None = Field(None, description="Only null is accepted.")
    audio: None = Field(None, description="Only null is accepted.")
    function_call: None = Field(None, description="Only null is accepted.")
    annotations: Annotated[Nothing | None, only([], "answers of this server have no annotations")] = Field(
        None, description="Only an empty value is accepted."
    )
    reasoning: None = Field(None, description="Only null is accepted.")
    reasoning_content: None = Field(None, description="Only null is accepted.")
    provider_specific_fields: dict[str, Any] | None = Field(
        None, description="LiteLLM's field; accepted, has no effect."
    )
