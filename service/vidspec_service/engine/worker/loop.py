"""WorkerLoop: what both workers' loops are built from, and their turns: hear, work, wait if there is nothing to do."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vidspec_models.decoder.kv_cache import KVPool
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.config import CPU_KV_CACHE_TOKENS, prefill_rows
from vidspec_service.engine.ipc.channel import Channel, PeerLink, Readable, wait_readable
from vidspec_service.engine.ipc.messages import Configure
from vidspec_service.engine.worker.input_processor import InputProcessor
from vidspec_service.engine.worker.meter import HEARTBEAT_S, WorkMeter


class WorkerLoop(ABC):
    """Owns every request on one device. Single-threaded; ends when the API's channel closes."""

    sees_whole_videos: bool  # of compressed requests, too

    def __init__(self, model: VideoLM, api: Channel, config: Configure, peer: PeerLink) -> None:
        self._model = model
        self._api = api
        self._config = config.engine
        self._prefill_rows = prefill_rows(config.engine, model.decoder.geometry.device.type, config.prompt_threads)
        self._pool = KVPool(model.decoder.geometry, self._config.kv_cache_tokens or CPU_KV_CACHE_TOKENS)
        self._inputs = InputProcessor(
            model,
            self._config.max_cached_feature_bytes,
            self._config.dycoke,
            sees_whole_videos=self.sees_whole_videos,
            context_length=None if self.sees_whole_videos else self.context_length,  # of the whole it reads a part
        )
        self._meter = WorkMeter()
        self._peer = peer
        self._wakers: tuple[Readable, ...] = (api, self._inputs, peer)  # everything that may wake the loop

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer: what the model, the operator and the cache budget allow."""
        limit = self._config.max_context or self._model.context_length
        return min(self._model.context_length, limit, self._pool.num_tokens)

    @property
    def kv_cache_tokens(self) -> int:
        """That all requests together have room for."""
        return self._pool.num_tokens

    def run(self) -> None:
        """Serve until the API's channel closes (ChannelClosed propagates to the worker's shell)."""
        try:
            while True:
                self._receive()
                if not self._work():
                    wait_readable(self._wakers, HEARTBEAT_S)
                self._meter.beat(self._api, self._pool.usage, has_peer=self._peer.channel is not None)
        finally:
            self._peer.disconnect()

    @abstractmethod
    def _receive(self) -> None:
        """Take all messages that have come, from the API and from the other worker."""

    @abstractmethod
    def _work(self) -> bool:
        """One step, whatever there is to do; False if nothing is left that could be done before something comes."""
