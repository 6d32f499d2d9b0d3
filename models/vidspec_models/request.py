"""The request: a conversation about videos and how to answer it. All processes use these types; no torch needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class SpeculationMode(StrEnum):
    """How draft and target share the work; the text is the same in every mode."""

    AUTO = "auto"
    PARALLEL = "parallel"
    SERIAL = "serial"
    OFF = "off"


class Compression(StrEnum):
    """Lossy target-side token compression; an explicit opt-in."""

    NONE = "none"
    V_CAST = "v-cast"
    VIDCOM2 = "vidcom2"
    DYCOKE = "dycoke"
    EARLYTOM = "earlytom"


class Preservation(StrEnum):
    """Which of a video's tokens the draft sees (docs/methods.md); speed only."""

    HIPPO = "hippo"
    SPECVLM = "specvlm"
    ATTENTION = "attention"
    UNBIASED = "unbiased"
    UNIFORM = "uniform"
    RANDOM = "random"
    TTM = "ttm"
    NONE = "none"
    BLIND = "blind"


class Include(StrEnum):
    """Extra information about how an answer was made, on request; it never changes the answer."""

    TOKEN_DETAILS = "token_details"
    DRAFT_VIEW = "draft_view"
    TIMELINE = "timeline"


class ToolFormat(StrEnum):
    """How a checkpoint's chat template handles tools."""

    NONE = "none"  # the template ignores tools
    HERMES = "hermes"  # the model writes a call as `<tool_call>` and JSON, as Hermes and Qwen do
    OTHER = "other"  # the model writes calls in another format


THINK, END_THINK = "<think>", "</think>"  # tokens of models that think before they say something


class Reasoning(StrEnum):
    """Where an answer has what the model thinks; it ends with the token `</think>`."""

    NONE = "none"  # nowhere: the model has no such tokens, or was not asked through its chat template
    TAGGED = "tagged"  # after `<think>`, if the answer begins with it
    OPEN = "open"  # at the beginning: the prompt ends with `<think>`, or within a thought


VIDEO = None  # in a turn's parts: stands for the next of the request's videos


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function call that the assistant made earlier in the conversation."""

    call_id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message: its texts and videos, in order. Each VIDEO stands for the next of the request's videos."""

    role: str  # "system" | "user" | "assistant" | "tool"
    parts: tuple[str | None, ...]
    tool_calls: tuple[ToolCall, ...] = ()  # in an assistant's turn
    tool_call_id: str | None = None  # in a tool's turn: the call whose result this turn is
    reasoning: str = ""  # in an assistant's turn: what it thought before; templates leave out most of it
    token_ids: tuple[int, ...] = ()  # only without a template, instead of parts: the prompt as the model's tokens

    @property
    def text(self) -> str:
        """All text parts, joined by newlines."""
        return "\n".join(part for part in self.parts if part is not VIDEO)

    @property
    def num_videos(self) -> int:
        return self.parts.count(VIDEO)

    @property
    def is_about_tools(self) -> bool:
        return bool(self.tool_calls) or self.tool_call_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """What the checkpoint's chat template gets besides the turns."""

    add_generation_prompt: bool = True  # end the prompt with the words that open the assistant's answer
    continue_final_message: bool = False  # leave the last turn open, whatever its role: the answer continues it
    switches: dict[str, bool] = field(default_factory=dict)  # variables that some templates read, by name
    tools: tuple[str, ...] = ()  # one JSON text per tool, in the format of OpenAI's API


DEFAULT_TEMPLATE = ChatTemplate()


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerOutput:
    """A vision tower's output for a video, before the projector: a model with the same tower need not run it again."""

    placeholder_text: str  # what stands for the video in the templated prompt
    rows: NDArray[np.float32]  # [T, rows of a frame, width]


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """One clip's sampled frames, as the model will see them, and the facts about their source that processors need."""

    frames: NDArray[np.uint8]  # [T, H, W, 3] RGB
    source_indices: tuple[int, ...]  # [T] index of each frame in the source
    source_fps: float  # average frame rate of the source, frames per second
    source_num_frames: int
    duration_s: float
    key: str | None = None  # equal keys mean equal frames, sampled for the same caller; None: never equal to another
    tower: TowerOutput | None = None  # set if another worker has run the same tower on this video


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution a token is drawn from. temperature 0 is greedy; all other numbers are off by default."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0  # as a share of the likeliest token's probability
    seed: int = 0  # 64 bits; the caller draws one at random when the client sent none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # `bad_words`, tokenized by the engine

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Everything the engine needs for one answer. The same request and seed give the same text in every mode."""

    request_id: str
    caller: str = ""  # who sent the request: callers take turns
    turns: tuple[Turn, ...]
    videos: tuple[Video, ...] = ()
    template: ChatTemplate | None = DEFAULT_TEMPLATE  # None: the turns' text is the prompt, unchanged
    max_tokens: int | None = None  # None: the room left in the context, limited by the server's default
    sampling: SamplingParams = field(default_factory=SamplingParams)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # end the answer, like the model's own end tokens
    ignore_eos: bool = False  # the model's own end tokens do not end the answer
    logprobs: int | None = None  # number of alternatives reported with each token's log probability; None: no report
    speculation: SpeculationMode = SpeculationMode.AUTO
    compression: Compression = Compression.NONE
    compression_ratio: float | None = None  # share of a video's tokens to keep, in (0, 1]; None: the method's default
    preservation: Preservation | None = None  # None: the server's default
    prune_ratio: float | None = None  # in [0, 0.99]; None: the server's default
    cache_salt: str | None = None  # see `cache_scope`
    include: frozenset[Include] = frozenset()
    grammar: str | None = None  # the form that the answer must have, as an llguidance grammar
    committed: tuple[int, ...] = ()  # answer tokens that exist already: generation continues after them
    n: int = 1  # number of answers to the prompt
    parent_id: str | None = None  # for one of several answers: the id of the request for all of them

    @property
    def cache_scope(self) -> tuple[str, str | None]:
        """Whose prefixes and answers are used for this request: that it is faster tells that they were there."""
        return self.caller, self.cache_salt

    @property
    def names_tokens(self) -> bool:
        """Whether the request names single tokens, by id or by text."""
        law, are_ids = self.sampling, any(turn.token_ids for turn in self.turns)
        return bool(self.stop_token_ids or law.logit_bias or law.bad_words or are_ids)

    def choice(self, index: int) -> GenerationRequest:
        """Answer `index` (0 <= index < n) as its own request; its seed is the request's plus `index`, modulo 2^64.

        So each answer has the text of the same request with that seed and n = 1; the first one equals the answer
        without `n`.
        """
        if self.n == 1:
            return self
        return replace(
            self,
            request_id=f"{self.request_id}-{index}",
            sampling=replace(self.sampling, seed=(self.sampling.seed + index) % 2**64),
            n=1,
            parent_id=self.request_id,
            include=self.include if index == 0 else self.include & {Include.TOKEN_DETAILS},
        )

    def end_ids(self, model_end_ids: frozenset[int]) -> frozenset[int]:
        """Ids that end the answer; `model_end_ids` are the model's own."""
        return (frozenset() if self.ignore_eos else model_end_ids).union(self.stop_token_ids)
