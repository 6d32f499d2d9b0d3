"""InputProcessor: turns requests into prompts in its own thread, so that a vision tower does not stop the streams.

The tower, the processor and the embedding are read-only and release the GIL while they compute; the worker's loop goes
on decoding meanwhile. Finished prompts wake the loop through a descriptor that it polls together with its channels.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from vidspec_models.compression.token_selector import token_selector
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.errors import Cancelled, ContextOverflow, ConversationRefused
from vidspec_models.grammar import GrammarError, GrammarMask
from vidspec_models.logits_processors import make_logits_processors
from vidspec_models.prompt import Prompt
from vidspec_models.request import Compression, GenerationRequest, Reasoning, TowerOutput
from vidspec_models.sampling import CoupledSampler
from vidspec_models.video_lm import VideoHandling, VideoLM
from vidspec_service.engine.ipc.messages import Configure, Declined, Generate, Proposal
from vidspec_service.engine.ipc.payload import TowerMemory, read_ids, read_request

logger = logging.getLogger(__name__)

MAX_PREPARING = 2  # prompts at a time on the target: one in the tower, the next one ready for it


@dataclass(slots=True, weakref_slot=True)
class QueuedRequest:
    """A request on its way to a prompt: `prompt` and all after it are known once it is processed."""

    request: GenerationRequest
    arrived: float = field(default_factory=time.monotonic)
    prompt: Prompt | Exception | None = None  # an exception says why there is none
    reasoning: Reasoning = Reasoning.NONE
    grammar: GrammarMask | None = None
    returns_tower_output: bool = False  # the tower's output is kept for a draft, which will be asked to follow
    tower: TowerMemory | None = None  # this output: made here, or received from the target
    queue_s: float = 0.0
    prepare_s: float = 0.0
    is_cancelled: bool = False
    proposals: list[Proposal | Declined] = field(default_factory=list)  # of a draft that was faster than the target

    @classmethod
    def of(cls, message: Generate, payload: Sequence[int]) -> QueuedRequest:
        """The request as the API sent it; closes the payload."""
        committed = read_ids(payload[-1]) if message.has_committed else ()
        request = read_request(payload[:-1] if message.has_committed else payload).choice(message.choice)
        return cls(replace(request, committed=(*request.committed, *committed)))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def sampler(self, model_end_ids: frozenset[int]) -> CoupledSampler:
        """Chooses the request's tokens; made here for both workers, so that the draft follows the target's rules."""
        request, prompt = self.request, self.prompt
        assert isinstance(prompt, Prompt)
        processors = make_logits_processors(request, prompt.ids, request.end_ids(model_end_ids))
        return CoupledSampler(request.sampling, processors, constraint=self.grammar)


class InputProcessor:
    """One prompt at a time, in the order of submission."""

    def __init__(self, model: VideoLM, config: Configure, context_length: int) -> None:
        """On the target, videos that leave no room in `context_length` are refused before the tower sees them.

        The draft reads only a part of the video tokens. It chooses them from the whole video even if the request is
        compressed, as long as its model has room: it guesses better if it can choose from all that the target sees.
        """
        self._encoder_cache = EncoderCache(config.engine.max_cached_feature_bytes)
        self._model = model
        self._dycoke = config.engine.dycoke
        self._is_draft = config.role == "draft"
        self._context_length = None if self._is_draft else context_length
        # Prompts that several answers share, as long as one of these answers is held here.
        self._shared: WeakValueDictionary[str, Prompt] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        self._thread.submit(bool)  # starts with every core; later, the draft's loop, from which it inherits, has fewer
        self._submitted: WeakValueDictionary[str, QueuedRequest] = WeakValueDictionary()  # by request id
        self._done: deque[QueuedRequest] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable as soon as a prompt is finished."""
        return self._wake

    def submit(self, item: QueuedRequest) -> None:
        """Process a request after those submitted before it."""
        self._submitted[item.request_id] = item
        self._thread.submit(self._process, item)

    def cancel(self, request_id: str) -> None:
        """Nobody waits for this request any more: its processing ends soon, maybe without a prompt."""
        if (item := self._submitted.get(request_id)) is not None:
            item.is_cancelled = True

    @property
    def has_finished(self) -> bool:
        """Whether something can be taken."""
        return bool(self._done)

    def take_finished(self) -> list[QueuedRequest]:
        """Everything finished since the last call."""
        try:
            num_finished = os.eventfd_read(self._wake)  # the number written so far: a later one is still to wake us
        except BlockingIOError:
            return []
        return [self._done.popleft() for _ in range(num_finished)]

    def _process(self, item: QueuedRequest) -> None:
        request, started = item.request, time.monotonic()
        try:
            item.prompt = self._prompt(item)
            item.reasoning = self._model.reasoning_after(item.prompt, request.turns, request.template)
            if request.grammar is not None:
                item.grammar = self._model.grammar_mask(request.grammar, item.reasoning)
        except (ContextOverflow, ConversationRefused, GrammarError, Cancelled) as error:
            # A new one: tracebacks, a cause's too, would keep the frames, and the item itself, until a collection.
            item.prompt = type(error)(*error.args)
        except Exception as error:  # any error is this request's own: it must not end each new worker in turn
            logger.exception("request %s could not be prepared", item.request_id)
            item.prompt = ValueError(f"the prompt could not be prepared ({type(error).__name__})")
        item.request = replace(request, videos=())  # the frames have been read: let go of their memory
        item.queue_s, item.prepare_s = started - item.arrived, time.monotonic() - started
        self._done.append(item)
        os.eventfd_write(self._wake, 1)

    def _prompt(self, item: QueuedRequest) -> Prompt:
        if item.is_cancelled:
            raise Cancelled("whoever asked has left")
        request, videos = item.request, item.request.videos
        if request.parent_id is not None and (shared := self._shared.get(request.parent_id)) is not None:
            return shared
        selector = token_selector(request.compression, request.compression_ratio, self._dycoke)
        if item.tower is not None:
            seen = [replace(video, tower=rows) for video, rows in zip(videos, item.tower.read(), strict=True)]
            if selector is not None and selector.select is None:
                # Rows of merged frames must not be cached for other requests, and cannot be compressed again.
                seen, selector = [replace(video, key=None) for video in seen], None
            videos, item.tower = tuple(seen), None
        if selector is not None and self._is_draft and self._model.has_room_for(videos, _num_others(request)):
            selector = None
        handling = VideoHandling(
            selector=selector,
            returns_tower_output=item.returns_tower_output,
            is_cancelled=lambda: item.is_cancelled,
            context_length=self._context_length,
        )
        prompt = self._model.prepare(request.turns, videos, self._encoder_cache, request.template, handling)
        if prompt.tower:
            item.tower, prompt = _in_memory(prompt.tower), replace(prompt, tower=())
        if request.compression is Compression.DYCOKE:
            prompt = replace(prompt, identity=None)  # hidden rows change places during decoding: no prefix to reuse
        if request.parent_id is not None:
            self._shared[request.parent_id] = prompt
        return prompt


def _num_others(request: GenerationRequest) -> int:
    """Upper bound for the rows of text and answer: every token has at least one byte."""
    return sum(len(turn.text.encode()) for turn in request.turns) + (request.max_tokens or 0)


def _in_memory(tower: Sequence[TowerOutput]) -> TowerMemory | None:
    """None if the machine has no room: the draft then runs its own tower."""
    try:
        return TowerMemory.of(tower)
    except OSError as error:
        logger.warning("the vision tower's output cannot be passed to the draft: %s", error)
        return None
