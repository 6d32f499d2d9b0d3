"""Bodies and answers of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from vidspec_service.api.schemas.fields import MAX_TEXT, Strict

MAX_TOKENS = 65_536
ModelName = Annotated[str, Field(max_length=256)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Tokenize(Strict):
    """A text to count."""

    model: ModelName | None = Field(None, description="The model served here, if given.")
    prompt: Annotated[str, StringConstraints(max_length=MAX_TEXT)] = Field(description="Text, as it is.")
    add_special_tokens: bool | None = Field(True, description="With those that the tokenizer puts around a text.")
    return_token_strs: bool | None = Field(False, description="Tell each token's piece of the vocabulary, too.")


class Tokenized(BaseModel):
    """Its tokens."""

    count: int
    max_model_len: int = Field(description="Tokens of a prompt and its answer together.")
    tokens: list[int]
    token_strs: list[str] | None


class Detokenize(Strict):
    """Tokens to read."""

    model: ModelName | None = Field(None, description="The model served here, if given.")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)] = Field(
        description="Ids; those that the tokenizer does not have are left out."
    )


class Detokenized(BaseModel):
    """What they say, special tokens included."""

    prompt: str
