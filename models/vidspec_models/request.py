"""What is asked: a conversation about videos and how to answer it. The same object in every process; needs no torch."""

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
    """What is told of how an answer came about, if it is asked for; it changes nothing about the answer."""

    TOKEN_DETAILS = "token_details"
    DRAFT_VIEW = "draft_view"
    TIMELINE = "timeline"


class ToolFormat(StrEnum):
    """What a checkpoint's chat template makes of tools."""

    NONE = "none"  # it does not read them
    HERMES = "hermes"  # the model calls one as `<tool_call>` and JSON, as Hermes and Qwen do
    OTHER = "other"  # it calls them in another way


VIDEO = None  # among a turn's parts: the next of the request's videos


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a function that the assistant made earlier."""

    call_id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message: what is said and shown, in order. Every VIDEO stands for one of the request's videos, in order."""

    role: str  # "system" | "user" | "assistant" | "tool"
    parts: tuple[str | None, ...]
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str | None = None  # of a tool's turn: the call whose result it is

    @property
    def text(self) -> str:
        """All that is said, a line for each part."""
        return "\n".join(part for part in self.parts if part is not VIDEO)

    @property
    def num_videos(self) -> int:
        return self.parts.count(VIDEO)

    @property
    def is_about_tools(self) -> bool:
        return bool(self.tool_calls) or self.tool_call_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """What the checkpoint's chat template is told besides the turns."""

    add_generation_prompt: bool = True  # the words that open the assistant's answer come last
    continue_final_message: bool = False  # the last turn stays open, whosever it is: the answer goes on with it
    switches: dict[str, bool] = field(default_factory=dict)  # variables that some templates read, by name
    tools: tuple[str, ...] = ()  # each the JSON text that OpenAI's API describes a tool by


DEFAULT_TEMPLATE = ChatTemplate()


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRows:
    """What a vision tower has made of a video, before the projector: who has the same tower need not run it again."""

    words: str  # what stands for the video in the templated text
    rows: NDArray[np.float32]  # [T, rows of a frame, width]


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """One clip's chosen frames, as the model will see them, and what a processor wants to know of their source."""

    frames: NDArray[np.uint8]  # [T, H, W, 3] RGB
    source_indices: tuple[int, ...]  # [T] index of each frame in the source
    source_fps: float  # average frame rate of the source, frames per second
    source_num_frames: int
    duration_s: float
    key: str | None = None  # equal keys mean equal frames, chosen for the same caller; None: unlike any other
    tower: TowerRows | None = None  # where another worker has seen it with the same tower


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution a token is drawn from. temperature 0 is greedy; the default of every other number is off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0  # of the likeliest token's probability
    seed: int = 0  # 64 bits; the caller draws one at random when the client sent none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # what the engine's tokenizer makes of them

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Everything the engine needs to answer once. Same request and seed: same text in every mode."""

    request_id: str
    caller: str = ""  # whose it is: callers take turns
    turns: tuple[Turn, ...]
    videos: tuple[Video, ...] = ()
    template: ChatTemplate | None = DEFAULT_TEMPLATE  # None: the turns' text is the prompt as it is
    max_tokens: int | None = None  # None: what the context leaves, bounded by the server's default
    sampling: SamplingParams = field(default_factory=SamplingParams)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # end an answer as the model's own end tokens do
    ignore_eos: bool = False  # those of the model do not end it
    logprobs: int | None = None  # so many alternatives are told with each token's log probability; None: not even that
    speculation: SpeculationMode = SpeculationMode.AUTO
    compression: Compression = Compression.NONE
    compression_ratio: float | None = None  # share of a video's tokens that stays, in (0, 1]; None: the method's
    preservation: Preservation | None = None  # None: the server's
    prune_ratio: float | None = None  # in [0, 0.99]; None: the server's
    include: frozenset[Include] = frozenset()
    grammar: str | None = None  # what the answer must look like, in llguidance's words
    committed: tuple[int, ...] = ()  # tokens of the answer that exist already: generation goes on after them
    n: int = 1  # answers to the prompt
    prompt_of: str | None = None  # of one answer among several: the request for all of them

    @property
    def names_tokens(self) -> bool:
        """Whether it speaks of single tokens, by id or by text."""
        return bool(self.stop_token_ids or self.sampling.logit_bias or self.sampling.bad_words)

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature, top-p, top-k, min-p and a grammar decides on its tokens."""
        law = self.sampling
        return bool(law.logit_bias or law.has_penalties or law.bad_word_ids or self.min_tokens)

    def choice(self, index: int) -> GenerationRequest:
        """Answer `index` < n, from 0, as a request of its own: its seed is the request's plus `index`, modulo 2^64.

        So it is the text that the same request gets with that seed and n = 1, and the first is the one without `n`.
        """
        if self.n == 1:
            return self
        return replace(
            self,
            request_id=f"{self.request_id}-{index}",
            sampling=replace(self.sampling, seed=(self.sampling.seed + index) % 2**64),
            n=1,
            prompt_of=self.request_id,
            include=self.include if index == 0 else self.include & {Include.TOKEN_DETAILS},
        )

    def end_ids(self, model_end_ids: frozenset[int]) -> frozenset[int]:
        """Ids that end the answer; `model_end_ids` are the model's own."""
        return (frozenset() if self.ignore_eos else model_end_ids).union(self.stop_token_ids)
