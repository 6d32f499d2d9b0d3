"""Log probabilities as OpenAI's API tells them, in both dialects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from vidspec_service.engine.types import Logprob, TokenLogprob


class TopLogprob(BaseModel):
    """One token that could have stood there."""

    token: str = Field(description="Its text; U+FFFD where it is a part of a character.")
    logprob: float = Field(description="Natural logarithm of its probability, before temperature and penalties.")
    bytes: list[int] = Field(description="Its text in UTF-8.")


class ContentLogprob(TopLogprob):
    """The token that stands there."""

    top_logprobs: list[TopLogprob] = Field(description="The likeliest tokens, best first.")


class ChoiceLogprobs(BaseModel):
    """One for each token of the answer, or of a chunk."""

    content: Iterable[ContentLogprob]  # each made when it is written: all at once take ten times as long
    refusal: None = None


def logprobs_of(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """What a ChoiceLogprobs is made of, once."""
    return {"content": ({**_told(each.token), "top_logprobs": [_told(other) for other in each.top]} for each in tokens)}


def _told(one: Logprob) -> dict[str, Any]:
    return {"token": one.text.decode(errors="replace"), "logprob": one.logprob, "bytes": list(one.text)}
