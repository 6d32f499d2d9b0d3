"""What an engine returns to its caller. Requests are declared in `vidspec_models.request`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import msgspec

from vidspec_models.request import Preservation, Reasoning, SpeculationMode


class FinishReason(StrEnum):
    """Why a generation ended: end-of-sequence or stop string, or token limit."""

    STOP = "stop"
    LENGTH = "length"


class RejectReason(StrEnum):
    """Why a worker cannot serve a request."""

    TOO_LONG = "too_long"  # prompt and answer do not fit the context
    INVALID = "invalid"  # the model's chat template refuses the conversation, or its tokens cannot follow the grammar
    FAILED = "failed"  # generating failed


RowLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""From one row of logits: the committed token's log probability; (id, log probability) of the likeliest tokens."""


# No `gc`: a request may have a million of these at a time, which the collector would scan again and again.
class Logprob(msgspec.Struct, frozen=True, gc=False):
    """A token's bytes, and the natural logarithm of its probability by the model, before temperature and penalties."""

    text: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A committed token, and the likeliest tokens in its place, best first."""

    offset: int  # where it begins in the answer's text, in characters; a part of a character begins where that does
    token: Logprob
    top: tuple[Logprob, ...]


class TokenSource(StrEnum):
    """Who wrote a token: the draft (the target agreed), the target alone, or the grammar (which allows no other)."""

    DRAFT = "draft"
    TARGET = "target"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetail:
    """A committed token: what it adds to the text (nothing while a character is incomplete), and who wrote it."""

    text: str
    source: TokenSource


class Phase(StrEnum):
    """A kind of work on a request: vision tower and prompt; prompt rows; draft tokens; their verification."""

    PREPARE = "prepare"
    PREFILL = "prefill"
    PROPOSE = "propose"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Work on a request, maybe together with others, from `start` to `end` on the monotonic clock of all processes."""

    request_id: str
    worker: str  # "target" | "draft"
    phase: Phase
    start: float
    end: float
    num_tokens: int  # of this request: rows that were prefilled or verified, tokens that were proposed


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCells:
    """Which cells of one video the draft sees."""

    shape: tuple[int, int, int]  # frames, rows, columns; a model may make one frame of two
    bits: bytes  # one for each cell, in reading order, lowest bit first


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftView:
    """What the draft sees of a request's videos, from here on."""

    request_id: str
    preservation: Preservation
    prune_ratio: float
    videos: tuple[SeenCells, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReady:
    """The prompt fits the context; always an answer's first event. `queue_s` ends when the target takes it up."""

    request_id: str
    prompt_tokens: int
    video_tokens: int
    queue_s: float = 0.0
    prepare_s: float = 0.0  # from there until the prompt was prepared
    reasoning: Reasoning = Reasoning.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Newly committed text; `num_tokens` tokens were committed since the last delta (text may be empty)."""

    text: str
    num_tokens: int
    choice: int = 0  # which of the request's answers
    ids: tuple[int, ...] = ()  # the tokens themselves
    logprobs: tuple[TokenLogprob, ...] = ()  # of these tokens, if asked for
    details: tuple[TokenDetail, ...] = ()  # of these tokens, if asked for

    @classmethod
    def joined(cls, deltas: Sequence[TextDelta]) -> TextDelta:
        """One delta for consecutive ones of an answer: thousands may wait for a slow reader."""
        if len(deltas) == 1:
            return deltas[0]
        return cls(
            text="".join(delta.text for delta in deltas),
            num_tokens=sum(delta.num_tokens for delta in deltas),
            choice=deltas[0].choice,
            ids=tuple(chain.from_iterable(delta.ids for delta in deltas)),
            logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
            details=tuple(chain.from_iterable(delta.details for delta in deltas)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What speculation did for one request.

    Acceptance is defined here, for answers and metrics alike: a draft token is *judged* when the target has compared
    it with a token of the answer. Judged are the accepted ones and the first one rejected; never judged are tokens
    after a rejection, or after the answer's end, even if the target has compared them. The acceptance rate is accepted
    over judged tokens, 0 when nothing was judged.
    """

    mode: SpeculationMode = SpeculationMode.OFF
    num_drafts: int = 0  # verifications that judged at least one draft token
    num_draft_tokens: int = 0  # judged
    num_accepted_tokens: int = 0
    num_verifications: int = 0  # target forwards that committed tokens of this request
    draft_video_tokens: int = 0  # visual tokens the draft saw

    @classmethod
    def of_all(cls, answers: Sequence[SpeculationStats]) -> SpeculationStats:
        """The statistics of all answers to one prompt together; there must be at least one."""
        return cls(
            mode=next((each.mode for each in answers if each.mode is not SpeculationMode.OFF), SpeculationMode.OFF),
            num_drafts=sum(each.num_drafts for each in answers),
            num_draft_tokens=sum(each.num_draft_tokens for each in answers),
            num_accepted_tokens=sum(each.num_accepted_tokens for each in answers),
            num_verifications=sum(each.num_verifications for each in answers),
            draft_video_tokens=max(each.draft_video_tokens for each in answers),
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted over judged draft tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_accepted_tokens(self) -> float:
        """Accepted draft tokens per verification (without the target's own token)."""
        return self.num_accepted_tokens / self.num_verifications if self.num_verifications else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Always the last event of an answer that did not fail."""

    choice: int = 0
    finish_reason: FinishReason
    completion_tokens: int
    speculation: SpeculationStats
    queue_s: float  # submit until the target took the request up
    prefill_s: float  # from there until the first token was committed
    cached_tokens: int = 0  # prompt tokens whose keys and values were there already
    reasoning_tokens: int = 0  # of the answer, up to `</think>`


ExtraEvent = Activity | DraftView
"""Events for requests that ask for them, between PromptReady and Finished."""

GenerationEvent = PromptReady | TextDelta | ExtraEvent | Finished
