"""The sampling fields of a request; the same in all dialects.

Names and meanings are those of OpenAI's API and vLLM; every number is bounded to what the engine can take.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from vidspec_models.request import SamplingParams
from vidspec_service.api.schemas.fields import Count, CountOrZero, Seed, Strict, as_list
from vidspec_service.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
MAX_BIASED = 300
MAX_BAD_WORDS = 64
MAX_BAD_WORD = 256  # characters
MAX_STOP_TOKENS = 64

TokenId = CountOrZero
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=MAX_BAD_WORD, pattern=r"\S")]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BadWords = Annotated[
    Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)],
    BeforeValidator(as_list, json_schema_input_type=BadWord | list[BadWord]),
]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)]


class SamplingFields(Strict):
    """Fields of every request that is answered. Null is the same as not given."""

    max_tokens: Count | None = Field(None, description="Maximum tokens of the answer; unset: the server's default.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        0.0, description="0 is greedy; unset: the checkpoint's default, else 0."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(1.0, description="Nucleus sampling; 1 turns it off.")
    top_k: CountOrZero | None = Field(0, description="Sample from the k most likely tokens only; 0 turns it off.")
    seed: Seed | None = Field(None, description="The same request and seed give the same text. Random if not given.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        0.0, description="Only tokens with at least this share of the most likely token's probability; 0 turns it off."
    )
    presence_penalty: Penalty | None = Field(
        0.0, description="Subtracted from a token's logit if the token is already in the answer."
    )
    frequency_penalty: Penalty | None = Field(
        0.0, description="Subtracted from a token's logit for each time the token is in the answer."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        1.0,
        description="Divides positive logits of tokens in prompt or answer, multiplies negative ones; 1 turns it off.",
    )
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASED)] | None = Field(
        None, description="Token ids and what is added to their logits, -100 to 100. JSON text in a form."
    )
    bad_words: BadWords | None = Field(
        None, description="Up to 64 words that never occur in the answer; repeat the part in a form."
    )
    min_tokens: CountOrZero | None = Field(
        0, description="No end token and none of `stop_token_ids` before the answer has this many tokens."
    )
    ignore_eos: bool | None = Field(False, description="The model's end token does not end the answer.")
    stop_token_ids: TokenIds | None = Field(
        None, description="Up to 64 token ids that end the answer and are not in it; repeat the part in a form."
    )
    logprobs: bool | None = Field(False, description="Return each token's log probability.")
    top_logprobs: TopLogprobs | None = Field(
        None, description="Also return this many of the most likely tokens at each position; only with `logprobs`."
    )

    @model_validator(mode="after")
    def _sampling_fields_agree(self) -> Self:
        if self.top_logprobs and self.num_logprobs is None:
            raise InvalidRequest("top_logprobs is only allowed with logprobs.", param="top_logprobs")
        most = self.most_tokens
        if most is not None and (self.min_tokens or 0) > most:
            raise InvalidRequest(f"min_tokens must not be more than max_tokens, {most}.", param="min_tokens")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that the answer may have; None: the client does not say."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likely tokens to return at each position, with log probabilities; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling_params(self) -> SamplingParams:
        """The parameters for the engine; the seed is random where the client gives none."""
        return SamplingParams(
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            bad_words=tuple(self.bad_words or ()),
            seed=secrets.randbits(64) if self.seed is None else self.seed,
        )
