"""From the target's messages to a caller's events: token ids become text, stop strings end it, facts are counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec.structs import replace
from tokenizers import Tokenizer

from vidspec_models.request import END_THINK, THINK, GenerationRequest, Include, Reasoning, SpeculationMode
from vidspec_service.engine.frontend.request_table import QueueItem
from vidspec_service.engine.frontend.tokens import LogprobsProcessor
from vidspec_service.engine.ipc.messages import Ended, Rejected, RequestMessage, Tokens
from vidspec_service.engine.types import (
    Activity,
    DraftView,
    ExtraEvent,
    Finished,
    FinishReason,
    GenerationEvent,
    PromptReady,
    RejectReason,
    SpeculationStats,
    TextDelta,
    TokenDetail,
    TokenSource,
)
from vidspec_service.errors import ContextLengthExceeded, EngineError, GenerationFailed, InvalidRequest, ServiceError
from vidspec_service.telemetry import EngineMetrics

_REPLACEMENT = "\ufffd"  # a tokenizer's text for bytes that are no character, or not yet
_MAX_HELD = 64  # tokens; a character has at most four bytes, so these make none, and each step decodes them again
_ERRORS: dict[RejectReason, type[ServiceError]] = {
    RejectReason.TOO_LONG: ContextLengthExceeded,
    RejectReason.INVALID: InvalidRequest,
    RejectReason.FAILED: GenerationFailed,
}


class OutputProcessor:
    """Turns one answer's messages from the target into its caller's events: detokenised, counted, ended once."""

    def __init__(
        self, tokenizer: Tokenizer, request: GenerationRequest, metrics: EngineMetrics, choice: int = 0
    ) -> None:
        """`choice` is the index of this answer among the request's answers."""
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._choice = choice
        self._text = Detokenizer(tokenizer, request.stop, request.stop_token_ids)
        self._logprobs = None if request.logprobs is None else LogprobsProcessor(tokenizer)
        self._is_detailed = Include.TOKEN_DETAILS in request.include
        self._early: list[ExtraEvent] = []  # events that came before PromptReady, which must be the first
        self._text.push(request.committed)  # the caller already has their text
        self._ids = list(request.committed)
        self._num_before = self._text.num_tokens
        self._mode = request.speculation
        self._prompt_ready: PromptReady | None = None
        self._prompt_ready_at = time.monotonic()
        self._prefill_s = 0.0
        self._forwards: list[Tokens] = []  # one message for each forward

    def process(self, messages: Sequence[RequestMessage]) -> list[GenerationEvent]:
        """Returns the events for one message, or for several Tokens that came together; Finished comes last.

        Raises the error of `_ERRORS` if the target rejected the request.
        """
        match message := messages[0]:
            case PromptReady():
                self._prompt_ready, self._prompt_ready_at = message, time.monotonic()
                return [message, *self._early]
            case Activity() | DraftView():
                if self._prompt_ready is None:
                    self._early.append(message)
                    return []
                return [message]
            case Rejected():
                raise _ERRORS[message.reason](message.message)
            case Tokens():
                return self._tokens([each for each in messages if isinstance(each, Tokens)])
            case Ended():
                rest = self._text.finish()
                # The rest may hold a stop string that only the last tokens completed.
                reason = FinishReason.STOP if self._text.is_stopped else message.finish_reason
                last = [TextDelta(text=rest, num_tokens=0, choice=self._choice)] if rest else []
                return [*last, self._finished(reason)]

    def _tokens(self, messages: Sequence[Tokens]) -> list[GenerationEvent]:
        if not self._forwards:  # the first Tokens end the prefill
            prepare_s = self._prompt_ready.prepare_s if self._prompt_ready else 0.0
            self._prefill_s = prepare_s + time.monotonic() - self._prompt_ready_at
        work: list[GenerationEvent] = []
        deltas: list[TextDelta] = []
        for message in messages:
            work += message.work
            deltas.append(self._delta(message))
            if self._text.is_stopped:
                break
        ended = [self._finished(FinishReason.STOP)] if self._text.is_stopped else []
        return [*work, TextDelta.joined(deltas), *ended]

    def _delta(self, message: Tokens) -> TextDelta:
        before = self._text.num_tokens
        text = self._text.push(message.ids)
        num_tokens = self._text.num_tokens - before
        # Draft tokens after a stop string were compared, too, but not with tokens of the answer.
        num_judged, num_accepted = min(message.num_judged, num_tokens), min(message.num_accepted, num_tokens)
        self._observe(replace(message, num_judged=num_judged, num_accepted=num_accepted))
        ids, rows = message.ids[:num_tokens], message.logprobs[:num_tokens]
        self._ids += ids
        logprobs = self._logprobs.process(ids, self._text.offsets, rows) if self._logprobs is not None else ()
        steps = self._text.steps if self._is_detailed else ()
        details = tuple(TokenDetail(text=step, source=_source(place, message)) for place, step in enumerate(steps))
        return TextDelta(
            text=text, num_tokens=num_tokens, choice=self._choice, ids=ids, logprobs=logprobs, details=details
        )

    def _observe(self, forward: Tokens) -> None:
        """Count a forward for the answer and in the metrics, which SpeculationStats defines alike."""
        self._forwards.append(forward)
        metrics = self._metrics
        metrics.spec_decode_rollbacks.inc(forward.num_rollbacks)
        metrics.spec_decode_wasted_draft_tokens.inc(forward.num_wasted)
        if forward.num_judged:
            metrics.spec_decode_num_drafts.inc()
            metrics.spec_decode_num_draft_tokens.inc(forward.num_judged)
            metrics.spec_decode_num_accepted_tokens.inc(forward.num_accepted)
            for position in range(forward.num_accepted):
                metrics.spec_decode_num_accepted_tokens_per_pos.labels(str(position)).inc()

    def _finished(self, reason: FinishReason) -> Finished:
        # For `auto`, tell what was done: `auto` is a way to choose a mode, not a way to decode.
        num_drafts = sum(forward.num_judged > 0 for forward in self._forwards)
        used = SpeculationMode.PARALLEL if num_drafts else SpeculationMode.OFF
        return Finished(
            choice=self._choice,
            finish_reason=reason,
            completion_tokens=self._text.num_tokens - self._num_before,
            speculation=SpeculationStats(
                mode=used if self._mode is SpeculationMode.AUTO else self._mode,
                num_drafts=num_drafts,
                num_draft_tokens=sum(forward.num_judged for forward in self._forwards),
                num_accepted_tokens=sum(forward.num_accepted for forward in self._forwards),
                num_verifications=max(len(self._forwards) - 1, 0),
                draft_video_tokens=self._forwards[-1].draft_video_tokens if num_drafts else 0,
            ),
            queue_s=self._prompt_ready.queue_s if self._prompt_ready else 0.0,
            prefill_s=self._prefill_s,
            cached_tokens=self._forwards[0].num_cached if self._forwards else 0,
            reasoning_tokens=self._num_reasoning_tokens(),
        )

    def _num_reasoning_tokens(self) -> int:
        """Tokens of the answer so far up to `</think>`."""
        think, end = map(self._tokenizer.token_to_id, (THINK, END_THINK))
        reasoning = self._prompt_ready.reasoning if self._prompt_ready else Reasoning.NONE
        if reasoning is Reasoning.TAGGED and think in self._ids:  # some models begin with a line break
            said = self._tokenizer.decode(self._ids[: self._ids.index(think)])
            reasoning = Reasoning.NONE if said.strip() else Reasoning.OPEN
        if reasoning is not Reasoning.OPEN:
            return 0
        return self._ids.index(end) + 1 if end in self._ids else len(self._ids)


def _source(place: int, message: Tokens) -> TokenSource:
    """GRAMMAR for a forced token, whoever proposed it; of the others, the accepted draft tokens come first."""
    if place in message.forced:
        return TokenSource.GRAMMAR
    return TokenSource.DRAFT if place < message.num_accepted else TokenSource.TARGET


class DecodeStream:
    """Decodes tokens one by one to the text that decoding all of them at once gives.

    The library's class of this name raises if bytes that are no character change text that it has returned.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._previous: list[int] = []  # the last tokens that gave text; decoded after them, the next keep their spaces
        self._held: list[int] = []  # tokens since then
        self.num_held = 0  # characters of theirs before one that is incomplete

    def step(self, token: int) -> str:
        """Take the next token; returns the text that is now certain, which never ends in the middle of a character."""
        self._held.append(token)
        text = self.rest()
        if (not text or text.endswith(_REPLACEMENT)) and len(self._held) < _MAX_HELD:
            self.num_held = len(text.rstrip(_REPLACEMENT))
            return ""
        self._previous = self._held if text else self._previous
        self._held = []
        self.num_held = 0
        return text

    def rest(self) -> str:
        """Text that was not handed out, such as an incomplete character."""
        before, both = self._decode(self._previous), self._decode(self._previous + self._held)
        # A byte-fallback decoder replaces a whole run of byte tokens if one of them makes no character.
        return both[len(before) :] if both.startswith(before) else self._decode(self._held)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Detokenizer:
    """Feeds ids through one stream: never splits a character, never shows text that may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], stop_token_ids: Sequence[int] = ()) -> None:
        """`stop_token_ids` add no text, like the model's own end tokens."""
        self._stream = DecodeStream(tokenizer)
        self._stop = tuple(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._decoded = ""  # all text of the stream
        self._shown = 0  # characters of it already handed out
        self.num_tokens = 0  # tokens up to and including the one that completed a stop string
        self.steps: list[str] = []  # what each of the tokens last pushed adds to the text
        self.offsets: list[int] = []  # where it begins in the text
        self.is_stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Take committed ids; return text that is now certain. After a stop string, nothing more."""
        self.steps, self.offsets = [], []
        for token in ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            self.offsets.append(len(self._decoded) + self._stream.num_held)
            self.steps.append("" if token in self._stop_token_ids else self._stream.step(token))
            self._decoded += self.steps[-1]
            self._find_stop()
        return self._release(len(self._decoded) if self.is_stopped else self._safe_length())

    def finish(self) -> str:
        """The rest, once no more ids come: held-back text and the remains of an incomplete character."""
        if not self.is_stopped:
            self._decoded += self._stream.rest()
            self._find_stop()
        return self._release(len(self._decoded))

    def _release(self, upto: int) -> str:
        text = self._decoded[self._shown : upto]
        self._shown = upto
        return text

    def _find_stop(self) -> None:
        starts = [at for at in (self._decoded.find(text, self._shown) for text in self._stop) if at >= 0]
        if starts:
            self._decoded = self._decoded[: min(starts)]
            self.is_stopped = True

    def _safe_length(self) -> int:
        """Length of the text before its longest ending that could be the start of a stop string."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for held in range(min(longest, len(self._decoded) - self._shown), 0, -1):
            if any(text.startswith(self._decoded[-held:]) for text in self._stop):
                return len(self._decoded) - held
        return len(self._decoded)


async def drain(messages: asyncio.Queue[QueueItem]) -> list[QueueItem]:
    """Returns everything in the queue; waits for the first item."""
    items = [await messages.get()]
    while not messages.empty():
        items.append(messages.get_nowait())
    return items


def grouped(items: Sequence[QueueItem]) -> Iterator[list[RequestMessage]]:
    """Group consecutive Tokens of one answer, since an event costs the same however many tokens it has.

    Raises an error among the items, after yielding all messages before it.
    """
    for _, group in groupby(items, lambda item: item.request_id if isinstance(item, Tokens) else id(item)):
        messages: list[RequestMessage] = []
        for item in group:
            if isinstance(item, EngineError):
                raise item
            messages.append(item)
        yield messages
