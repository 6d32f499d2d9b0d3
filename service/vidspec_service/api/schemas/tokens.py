"""Bodies and answers of /tokenize and /detokenize, as vLLM has them, and of OpenAI's /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, StringConstraints, model_validator

from vidspec_models.request import Turn
from vidspec_service.api.schemas.chat_messages import ChatMessage, check_conversation, placed_turns_of
from vidspec_service.api.schemas.client_fields import TemplateFields
from vidspec_service.api.schemas.fields import MAX_TEXT, MAX_TURNS, ModelName, TokenId, exactly_one_of
from vidspec_service.errors import InvalidRequest

MAX_TOKENS = 65_536


class TokenizeRequest(ModelName, TemplateFields):
    """A text, or a conversation, to count."""

    prompt: Annotated[str, StringConstraints(max_length=MAX_TEXT)] | None = Field(
        None, description="Text, used as it is; or give `messages`."
    )
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_TURNS)] | None = Field(
        None, description="A conversation without videos, written by the chat template."
    )
    add_special_tokens: bool | None = Field(
        None, description="For `prompt`: add the special tokens that the tokenizer puts around a text; unset: true."
    )
    return_token_strs: bool | None = Field(False, description="Also return each token's string in the vocabulary.")

    _one_of_them = exactly_one_of("prompt", "messages", param="prompt")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.prompt is not None:
            self._check_prompt()
        else:
            self._check_messages()
        return self

    def _check_prompt(self) -> None:
        said = {
            "add_generation_prompt": self.add_generation_prompt is False,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.template.switches,
        }
        for name, is_said in said.items():
            if is_said:
                raise InvalidRequest(f"{name} is only allowed with messages.", param=name)

    def _check_messages(self) -> None:
        check_conversation(placed_turns_of(self.messages or ()), is_continued=bool(self.continue_final_message))
        check_text(self.turns, "messages")
        if self.return_token_strs:
            raise InvalidRequest("For messages only the number of tokens is returned.", param="return_token_strs")
        if self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is only allowed with prompt; messages get the tokens that the model needs.",
                param="add_special_tokens",
            )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation."""
        return tuple(turn for _, turn in placed_turns_of(self.messages or ()))


def check_text(turns: Iterable[Turn], param: str) -> None:
    """Raises InvalidRequest if there are videos among the turns."""
    if any(turn.num_videos for turn in turns):
        raise InvalidRequest("Messages must be text here; an answer's usage has the tokens of its videos.", param=param)


class TokenizeResponse(BaseModel):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int = Field(description="Tokens of a prompt and its answer together.")
    tokens: list[int] | None = Field(description="null for a conversation: only its tokens are counted.")
    token_strs: list[str] | None


class InputTokens(BaseModel):
    """The size of a prompt, in OpenAI's shape."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DetokenizeRequest(ModelName):
    """Tokens to turn into text."""

    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)] = Field(
        description="Token ids; ids unknown to the tokenizer are left out."
    )


class DetokenizeResponse(BaseModel):
    """The text of the tokens, special tokens included."""

    prompt: str
