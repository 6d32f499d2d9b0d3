"""WorkerLoop: the base of both workers' loops: receive messages, work, wait if there is nothing to do.

Outbox and WorkMeter are what it tells the API with: of requests, and of itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from vidspec_models.decoder.kv_cache import KVPool
from vidspec_models.request import GenerationRequest, Include
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.config import prefill_rows
from vidspec_service.engine.ipc.channel import Channel, PeerLink, wait_readable
from vidspec_service.engine.ipc.messages import MAX_HELD_TOKENS, Configure, Heartbeat, Message, Tokens
from vidspec_service.engine.types import Activity, Phase
from vidspec_service.engine.worker.input_processor import InputProcessor, QueuedRequest

HEARTBEAT_S = 1.0
_MAX_FORWARDS = 1000  # in one heartbeat, which is sent early when it has so many


class WorkerLoop(ABC):
    """Owns every request on one device. Single-threaded; ends when the API's channel closes."""

    def __init__(self, model: VideoLM, api: Channel, config: Configure, peer: PeerLink) -> None:
        self._model = model
        self._api = api
        self._role = config.role
        self._config = config.engine
        self._prefill_rows = prefill_rows(config.engine, model.decoder.geometry.device.type, config.prompt_threads)
        assert self._config.kv_cache_tokens is not None  # the budget that the API has granted
        self._pool = KVPool(model.decoder.geometry, self._config.kv_cache_tokens)
        self._inputs = InputProcessor(model, config, self.context_length)
        self._outbox = Outbox(api, self._config.stream_interval_s)
        self._meter = WorkMeter()
        self._peer = peer
        self._wakers = (api, self._inputs, peer)  # everything that may wake the loop

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer: what the model, the operator and the cache budget allow."""
        limit = self._config.max_context or self._model.context_length
        return min(self._model.context_length, limit, self._pool.num_tokens)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache can hold for all requests together."""
        return self._pool.num_tokens

    def run(self) -> None:
        """Serve until the API's channel closes (ChannelClosed propagates to `worker_main`)."""
        try:
            while True:
                self._receive()
                if not self._work():
                    wait_readable(self._wakers, HEARTBEAT_S)
                self._beat()
        finally:
            self._peer.disconnect()

    def _beat(self) -> None:
        """Tell the API that the worker lives, if that is due."""
        self._meter.beat(self._api, self._pool.usage, has_peer=self._peer.channel is not None)

    def _require_device(self) -> None:
        """After an error of one request: raises if the device computes nothing any more, as after a CUDA error.

        A worker that went on would refuse every request; one that ends is started again.
        """
        for device in {span.device for span in self._model.decoder.geometry.spans}:
            torch.ones((), device=device).item()

    def _activity(
        self, request: GenerationRequest, phase: Phase, started: float, num_tokens: int
    ) -> tuple[Activity, ...]:
        """Work from `started` until now on `num_tokens` of a request; empty if the request asks for no timeline.

        Sent inside Tokens and Proposals: a further message for each forward would wake the API process twice as often.
        Preparing and prefilling do not recur with every token, so they have messages of their own.
        """
        if Include.TIMELINE not in request.include:
            return ()
        end = time.monotonic()
        work = Activity(
            request_id=request.request_id, worker=self._role, phase=phase, start=started, end=end, num_tokens=num_tokens
        )
        return (work,)

    def _report_prefill(self, request: GenerationRequest, started: float, num_tokens: int) -> None:
        """Report a chunk of `num_tokens` rows, prefilled from `started` until now."""
        for activity in self._activity(request, Phase.PREFILL, started, num_tokens):
            self._outbox.send(activity)

    def _report_prepare(self, item: QueuedRequest, num_tokens: int) -> None:
        """Report a prompt of `num_tokens`; it was ready before the loop took it."""
        started = item.arrived + item.queue_s
        for activity in self._activity(item.request, Phase.PREPARE, started, num_tokens):
            self._outbox.send(replace(activity, end=started + item.prepare_s))

    @abstractmethod
    def _receive(self) -> None:
        """Handle all messages that have come, from the API and from the other worker."""

    @abstractmethod
    def _work(self) -> bool:
        """Do one step of the work; returns False if there is nothing to do until a message or a prompt comes."""


class Outbox:
    """Sends messages at once, except tokens, of which at most MAX_HELD_TOKENS wait for a flush.

    So few, because the API must know about how far a target had come when a request killed it.

    Sending is cheap, but waking the process that waits takes some 90 microseconds on a virtual machine: a twelfth of a
    small model's step, and nobody reads a stream a thousand times a second. vLLM and SGLang count tokens for this
    (`stream_interval`); here it is a time, so that a slower model's tokens are still sent at once.
    """

    def __init__(self, channel: Channel, interval_s: float) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._flushed_at = 0.0
        self._held: list[Tokens] = []
        self._num_held = 0  # tokens

    def send(self, message: Message) -> None:
        """Send or hold back a message. Raises what `Channel.send` raises, also for messages held back before."""
        if isinstance(message, Tokens) and self._num_held + len(message.ids) <= MAX_HELD_TOKENS:
            self._held.append(message)
            self._num_held += len(message.ids)
            return
        self.flush()
        self._channel.send(message)

    def flush(self) -> None:
        """Send what is held back; called before work that takes time."""
        held, self._held, self._num_held = self._held, [], 0
        for message in held:
            self._channel.send(message)

    def flush_if_due(self) -> None:
        """Flush if `interval_s` has passed since this last did; called when all of a forward's tokens are here.

        Other flushes do not count: if they did, a slow model's tokens would wait for the next forward when another
        answer ends.
        """
        if self._held and (now := time.monotonic()) - self._flushed_at >= self._interval_s:
            self._flushed_at = now
            self.flush()


class WorkMeter:
    """`with meter:` around work, `rows` for a forward within it; `beat` tells the API once a second."""

    def __init__(self) -> None:
        self._since = self._entered = time.monotonic()
        self._busy_s = 0.0
        self._num_rows = 0
        self._forwards: list[tuple[float, float, int]] = []

    def __enter__(self) -> None:
        self._entered = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._busy_s += now - self._entered
        if self._num_rows:
            self._forwards.append((self._entered, now, self._num_rows))
        self._num_rows = 0

    def rows(self, num_rows: int) -> None:
        """Count a forward over `num_rows` in the current `with` block."""
        self._num_rows += num_rows

    def beat(self, api: Channel, cache_usage: float, *, has_peer: bool) -> None:
        """Send a heartbeat if one is due."""
        now = time.monotonic()
        if now - self._since < HEARTBEAT_S and len(self._forwards) < _MAX_FORWARDS:
            return
        api.send(
            Heartbeat(
                cache_usage=cache_usage,
                busy_s=self._busy_s,
                elapsed_s=now - self._since,
                until=now,
                forwards=tuple(self._forwards),
                has_peer=has_peer,
            )
        )
        self._since, self._busy_s = now, 0.0
        self._forwards.clear()
