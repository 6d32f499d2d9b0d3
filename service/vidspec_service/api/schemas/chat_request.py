"""ChatRequest: the fields of every request that is answered, with their limits; which of them exclude each other.

A field is either honoured or refused. Names and meanings are those of OpenAI's API and vLLM; every number is bounded to
what the engine can take. A valid body becomes a GenerationRequest here, and nowhere else.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from vidspec_models.request import (
    DEFAULT_TEMPLATE,
    ChatTemplate,
    Compression,
    GenerationRequest,
    Include,
    Preservation,
    SamplingParams,
    SpeculationMode,
    Turn,
)
from vidspec_service.api.schemas.dialects import Dialect
from vidspec_service.api.schemas.fields import (
    Count,
    CountOrZero,
    Fps,
    NotNegative,
    Positive,
    Seed,
    Stops,
    TokenId,
    TopLogprobs,
    VideoSource,
    as_list,
)
from vidspec_service.api.schemas.structured_output import StructuredOutput
from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.engine.frontend.interface import EngineInfo
from vidspec_service.errors import InvalidRequest
from vidspec_service.settings import Settings

MAX_N = 8
MAX_BIASED = 300
MAX_BAD_WORDS = 64
MAX_BAD_WORD = 256  # characters
MAX_STOP_TOKENS = 64

BadWord = Annotated[str, StringConstraints(min_length=1, max_length=MAX_BAD_WORD, pattern=r"\S")]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BadWords = Annotated[
    Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)],
    BeforeValidator(as_list, json_schema_input_type=BadWord | list[BadWord]),
]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)]


class ChatRequest(StructuredOutput):
    """How to sample, how to answer and which frames to look at: the same in every route. Null means not given."""

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

    stream: bool | None = Field(False, description="Answer with server-sent events as tokens are committed.")
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(
        1, description="Number of answers to the prompt, 1 to 8; answer i, counted from 0, uses the seed `seed` + i."
    )
    stop: Stops | None = Field(
        None,
        description="Up to 4 strings that end the answer and are not in it; repeat the part in a form.",
    )
    fps: Fps | None = Field(None, description="Frames per second of video; not with `num_frames`.")
    num_frames: Count | None = Field(None, description="Number of evenly sampled frames; not with `fps`.")
    max_frames: Count | None = Field(None, description="Maximum number of sampled frames.")
    start_s: NotNegative | None = Field(None, description="Sample from this second of the video on.")
    end_s: Positive | None = Field(None, description="Sample up to this second, exclusive.")
    speculation: SpeculationMode | None = Field(
        None, description="How draft and target share the work. It changes the speed, never the text."
    )
    compression: Compression | None = Field(
        None, description="Lossy compression of the video on the target; all but `none` may change the text."
    )
    compression_ratio: Annotated[float, Field(ge=0.01, le=1)] | None = Field(
        None, description="The share of the video's tokens that compression keeps."
    )
    preservation: Preservation | None = Field(
        None, description="Which of the video's tokens the draft sees. It changes the speed, never the text."
    )
    prune_ratio: Annotated[float, Field(ge=0, le=0.99)] | None = Field(
        None, description="The share of the video's tokens that the draft does not see."
    )
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = Field(
        None, description="Reuse what was computed for requests with the same cache_salt only, as for a user of yours."
    )

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.top_logprobs and self.num_logprobs is None:
            raise InvalidRequest("top_logprobs is only allowed with logprobs.", param="top_logprobs")
        most = self.most_tokens
        if most is not None and (self.min_tokens or 0) > most:
            raise InvalidRequest(f"min_tokens must not be more than max_tokens, {most}.", param="min_tokens")
        self.check_end()
        if self.fps is not None and self.num_frames is not None:
            raise InvalidRequest("Give fps or num_frames, not both.", param="fps")
        if self.end_s is not None and self.end_s <= (self.start_s or 0.0):
            raise InvalidRequest("end_s must be greater than start_s.", param="end_s")
        return self

    def check_end(self) -> None:
        """Raises InvalidRequest if both `ignore_eos` and a grammar say where the answer ends."""
        if self.ignore_eos and self.grammar is not None:
            raise InvalidRequest(
                "ignore_eos cannot be used with structured output: the answer ends where its grammar ends.",
                param="ignore_eos",
            )

    @property
    @abstractmethod
    def prompts(self) -> Sequence[tuple[Turn, ...]]:
        """The conversations to answer, mostly one."""

    @property
    @abstractmethod
    def sources(self) -> tuple[VideoSource, ...]:
        """Where the conversation's videos and images are, in their order."""

    @property
    @abstractmethod
    def dialect(self) -> Dialect:
        """How to answer."""

    @property
    def included(self) -> frozenset[Include]:
        """What to report besides the answer."""
        return frozenset()

    @property
    def template(self) -> ChatTemplate | None:
        """Arguments of the checkpoint's chat template; None: no template, the text itself is the prompt."""
        return DEFAULT_TEMPLATE

    def for_engine(self, info: EngineInfo) -> Self:
        """A copy for this engine: sampling fields that the client did not give get the checkpoint's values.

        Raises ModelNotFound for a model that is not served, InvalidRequest for what the engine cannot do.
        """
        most = info.default_max_tokens
        if self.most_tokens is None and (self.min_tokens or 0) > most:
            raise InvalidRequest(
                f"Without max_tokens an answer has at most {most} tokens (VIDSPEC_DEFAULT_MAX_TOKENS); "
                "min_tokens must not be more.",
                param="min_tokens",
            )
        unsaid = {name: value for name, value in info.default_sampling.items() if not self._is_given(name)}
        return self.model_copy(update=unsaid)

    @property
    def frames(self) -> FrameRequest:
        """Which frames the client wants."""
        return FrameRequest(
            fps=self.fps,
            num_frames=self.num_frames,
            max_frames=self.max_frames,
            start_s=self.start_s,
            end_s=self.end_s,
        )

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

    def generation_requests(self, name: str, settings: Settings) -> list[GenerationRequest]:
        """The requests to the engine, one for each prompt, without its videos.

        Answers are counted over all prompts: each uses the seed of the first plus its number.
        """
        compression = self.compression or settings.compression
        if compression is Compression.NONE and self.compression_ratio is not None:
            raise InvalidRequest(
                "compression_ratio needs a compression; none keeps every token.", param="compression_ratio"
            )
        n, sampling = self.n or 1, self.sampling_params()
        request = GenerationRequest(
            request_id=name,
            turns=(),
            template=self.template,
            sampling=sampling,
            max_tokens=self.most_tokens,
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.num_logprobs,
            grammar=None if self.grammar is None else self.grammar.text,
            speculation=self.speculation or settings.speculation,
            compression=compression,
            compression_ratio=self.compression_ratio or settings.compression_ratio,
            preservation=self.preservation,
            prune_ratio=self.prune_ratio,
            cache_salt=self.cache_salt,
            include=self.included,
            n=n,
        )
        return [
            replace(
                request,
                request_id=f"{name}-p{index}" if index else name,
                turns=turns,
                sampling=replace(sampling, seed=(sampling.seed + index * n) % 2**64),
            )
            for index, turns in enumerate(self.prompts)
        ]

    def _is_given(self, name: str) -> bool:
        return name in self.model_fields_set and getattr(self, name) is not None
