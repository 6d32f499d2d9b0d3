"""Scheduler: the state of every request on the target, and which requests have room in the KV cache.

waiting → preparing → prefilling → decoding, and preempted when the KV cache is full: the youngest request gives up its
rows, keeps its committed tokens, and is prefilled again, before its caller's others, once there is room. No request is
ever dropped.

Callers take turns (ADR 20): the next prompt to prepare is of the caller with the fewest requests here, the next chunk
to prefill is of the caller whose last chunk was the longest ago. Of one caller's prompts, the one with the fewest rows
left goes first; waiting counts as having fewer, so none waits for ever.

The beginnings of prompts serve others, so that another question about a video does not prefill them again: those of
ended requests stay in the prefix cache, and those of requests that are here are copied. A prefix is whole prefill
chunks, and the rest is prefilled in the same chunks as without it: every row has the bits of a fresh prefill, so an
answer does not depend on other requests. A request that needs the room of the prefix cache evicts prefixes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from vidspec_models.decoder.kv_cache import KVCache, KVPool
from vidspec_models.prompt import PromptIdentity
from vidspec_service.engine.target.request import TargetRequest
from vidspec_service.engine.worker.input_processor import MAX_PREPARING, QueuedRequest

_AGING = 4  # rows of waiting for the same caller's other prompts that count as 1 row less to prefill


class Scheduler:
    """Plain bookkeeping; the loop does the work."""

    def __init__(self, pool: KVPool, max_running_requests: int, prefill_chunk: int) -> None:
        self._pool = pool
        self._prefixes = PrefixCache(pool, prefill_chunk)
        self._max_running = max_running_requests
        self._prefill_chunk = prefill_chunk
        self._num_added = 0
        self.waiting: deque[QueuedRequest] = deque()
        self.preparing: dict[str, QueuedRequest] = {}
        self.preempted: deque[TargetRequest] = deque()
        self.prefilling: deque[TargetRequest] = deque()
        self.decoding: dict[str, TargetRequest] = {}
        self._num_chunks = 0
        self._last_chunks: dict[str, int] = {}  # caller → number of its last chunk among all chunks
        self._ended_siblings: list[TargetRequest] = []  # others are still to copy their rows

    @property
    def prepared(self) -> list[TargetRequest]:
        """All prepared requests: decoding, prefilling and preempted."""
        return [*self.decoding.values(), *self.prefilling, *self.preempted]

    @property
    def num_active(self) -> int:
        """Requests that hold a place, preempted ones included."""
        return len(self.preparing) + len(self.prefilling) + len(self.decoding) + len(self.preempted)

    @property
    def num_unfinished(self) -> int:
        """All requests on the target, waiting ones included."""
        return len(self.waiting) + self.num_active

    @property
    def can_compute(self) -> bool:
        """There is a forward to make now."""
        return bool(self.prefilling or self.decoding or self.preempted)

    @property
    def can_admit(self) -> bool:
        """A request waits, there is a place for it, and no preempted request comes first.

        There is none while the prompts here would fill the cache: a prompt itself takes memory, and it is counted with
        its keys and values (`kv_budget`), for which this one would have to wait.
        """
        is_full = self.num_active >= self._max_running or len(self.preparing) >= MAX_PREPARING
        if not self.waiting or self.preempted or is_full:
            return False
        return sum(request.prompt.num_tokens for request in self.prepared) < self._pool.num_tokens

    def begin_preparing(self) -> QueuedRequest | None:
        """Take a waiting request, if one can be admitted: the oldest of the caller who has the fewest here."""
        if not self.can_admit:
            return None
        here = [*(item.request for item in self.preparing.values()), *(each.asked for each in self.prepared)]
        num_here = Counter(request.caller for request in here)
        item = min(self.waiting, key=lambda item: num_here[item.request.caller])
        self.waiting.remove(item)
        self.preparing[item.request_id] = item
        return item

    def end_preparing(self, request_id: str) -> bool:
        """The prompt is there; False if the request was cancelled meanwhile."""
        return self.preparing.pop(request_id, None) is not None

    def add(self, request: TargetRequest) -> None:
        """Queue a prepared request for prefill."""
        self._num_added += 1
        request.ticket = self._num_added
        self.prefilling.append(request)  # first: if copying fails, `cancel` finds the request, and frees its room
        self.restore(request)

    def restore(self, request: TargetRequest) -> None:
        """Copy rows that the prefix cache or, by now, another request has; not once a row of its own is computed."""
        if request.cache.length == request.num_cached:
            request.num_cached = self._prefixes.restore(request, (*self.decoding.values(), *self.prefilling))

    def next_prefill(self) -> TargetRequest | None:
        """The request to prefill next; a preempted one takes part again once there is room for all of its rows."""
        while self.preempted:
            if self._pool.fits(self.preempted[0].num_rows_to_resume):
                self.prefilling.append(self.preempted.popleft())
                break
            if not self._evict():
                break
        if not self.prefilling:
            return None
        caller = min(
            (each.asked.caller for each in self.prefilling), key=lambda caller: self._last_chunks.get(caller, 0)
        )
        self._num_chunks += 1
        self._last_chunks[caller] = self._num_chunks
        mine = [each for each in self.prefilling if each.asked.caller == caller]
        # Tickets break ties. Once begun, a prompt has fewer rows left than those it was tied with.
        chosen = min(mine, key=lambda each: (each.num_rows_left - each.num_rows_waited / _AGING, each.ticket))
        for other in mine:
            if other is not chosen:
                other.num_rows_waited += self._prefill_chunk
        return chosen

    def sibling(self, request: TargetRequest) -> TargetRequest | None:
        """Another answer to the same prompt, if one has the prompt's rows and the logits after them."""
        parent_id = request.asked.parent_id  # without one, a request keeps no logits
        others = [*self.decoding.values(), *self._ended_siblings]
        return next((other for other in others if other.asked.parent_id == parent_id and other.has_prompt_rows), None)

    def begin_decoding(self, request: TargetRequest) -> None:
        """Move a request whose prompt is in the cache on to decoding."""
        self.prefilling.remove(request)
        self.decoding[request.request_id] = request
        self._release_siblings()

    def allocate(self, request: TargetRequest, num_rows: int) -> bool:
        """Make room for more rows of a request, preempting younger ones; False if it was itself preempted."""
        while not self._pool.grow(request.cache, request.cache.length + num_rows):
            if self._evict():
                continue
            youngest = max([*self.prefilling, *self.decoding.values()], key=lambda other: other.ticket)
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def finish(self, request_id: str) -> None:
        """Free an ended request's place and rows, except rows that a question about the same video can use."""
        self._ended_siblings.append(self.decoding.pop(request_id))
        self._release_siblings()

    def cancel(self, request_id: str) -> None:
        """Forget a request, wherever it is."""
        self.preparing.pop(request_id, None)
        request = self.decoding.pop(request_id, None)
        for queue in (self.prefilling, self.preempted):
            for item in [item for item in queue if item.request_id == request_id]:
                queue.remove(item)
                request = item
        if request is not None:
            self._pool.release(request.cache)
        self.waiting = deque(item for item in self.waiting if item.request_id != request_id)
        self._release_siblings()

    def _preempt(self, request: TargetRequest) -> None:
        if self.decoding.pop(request.request_id, None) is None:
            self.prefilling.remove(request)
        self._pool.release(request.cache)
        request.text_queries, request.num_cached = None, 0  # of rows that will be computed again
        request.num_rows_waited = math.inf
        self.preempted = deque(sorted([*self.preempted, request], key=lambda other: other.ticket))

    def _release_siblings(self) -> None:
        """Give ended siblings' rows to the prefix cache once no request will copy them any more."""
        if not self._ended_siblings:
            return
        coming = {item.request.parent_id for item in (*self.waiting, *self.preparing.values())}
        coming |= {request.asked.parent_id for request in (*self.prefilling, *self.preempted)}
        coming.discard(None)
        for sibling in self._ended_siblings:
            if sibling.asked.parent_id not in coming:
                self._prefixes.insert(sibling)
        self._ended_siblings = [sibling for sibling in self._ended_siblings if sibling.asked.parent_id in coming]

    def _evict(self) -> bool:
        """Make room without preempting a request: drop a prefix or an ended sibling; False if there is none."""
        if self._prefixes.evict():
            return True
        if self._ended_siblings:
            self._pool.release(self._ended_siblings.pop(0).cache)
            return True
        return False


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    head: tuple[object, ...]  # whose it is, rows of the first chunk, and the keys of the videos in it
    identity: PromptIdentity
    cache: KVCache

    @classmethod
    def of(cls, request: TargetRequest, chunk: int) -> _Prefix | None:
        """None if the prompt is shorter than a chunk, or if nothing of it may be reused."""
        identity = request.prompt.identity
        if identity is None or len(identity.rows) < chunk:
            return None
        first = identity.rows[:chunk]
        head = (request.asked.cache_scope, first.tobytes(), identity.keys_of(first))
        return cls(head, identity, request.cache)

    def num_common(self, other: PromptIdentity) -> int:
        """How many of the rows kept here both prompts begin with."""
        return min(self.cache.length, self.identity.num_common(other))


class PrefixCache:
    """Beginnings of ended prompts, each for its own caller. The first is dropped first; a use makes it the last."""

    def __init__(self, pool: KVPool, prefill_chunk: int) -> None:
        self._pool = pool
        self._chunk = prefill_chunk
        self._kept: list[_Prefix] = []

    def insert(self, request: TargetRequest) -> None:
        """Take over the cache of a request that has ended: its beginning stays, if it can serve another."""
        prompt, cache = request.prompt, request.cache
        num_rows = prompt.num_tokens // self._chunk * self._chunk
        prefix = _Prefix.of(request, self._chunk)
        if prefix is None or cache.hidden is not None or cache.length < num_rows:
            self._pool.release(cache)
        elif known := next(
            (kept for kept in self._alike(prefix) if kept.num_common(prefix.identity) >= num_rows), None
        ):
            self._pool.release(cache)
            self._touch(known)  # the known prefix has all rows that this one would add
        else:
            self._pool.shrink(cache, num_rows)
            self._pool.num_lent += cache.capacity
            self._kept.append(prefix)

    def restore(self, request: TargetRequest, others: Iterable[TargetRequest]) -> int:
        """Copy the longest known beginning of a prompt if it is longer than its cache; returns the cache's length.

        `others` have rows that are not kept here.
        """
        prompt, cache = request.prompt, request.cache
        prefix = _Prefix.of(request, self._chunk)
        if prefix is None:
            return cache.length
        here = [_Prefix.of(each, self._chunk) for each in others if each.cache.hidden is None]
        lent = [each for each in here if each is not None and each.head == prefix.head]
        found = max([*self._alike(prefix), *lent], key=lambda known: known.num_common(prefix.identity), default=prefix)
        # The last row is always computed: the first token comes from it.
        num_rows = min(found.num_common(prefix.identity), prompt.num_tokens - 1) // self._chunk * self._chunk
        if num_rows <= cache.length or not self._pool.grow(cache, num_rows):
            return cache.length
        cache.truncate(0)
        cache.copy_rows(found.cache, num_rows)
        if found not in lent:
            self._touch(found)
        return num_rows

    def _alike(self, prefix: _Prefix) -> list[_Prefix]:
        """Those kept whose first chunk is the same: others have no whole chunk in common, and there may be hundreds."""
        return [kept for kept in self._kept if kept.head == prefix.head]

    def evict(self) -> bool:
        """Drop the least recently used prefix; False if there is none."""
        if not self._kept:
            return False
        cache = self._kept.pop(0).cache
        self._pool.num_lent -= cache.capacity
        self._pool.release(cache)
        return True

    def _touch(self, prefix: _Prefix) -> None:
        self._kept = [other for other in self._kept if other is not prefix]
        self._kept.append(prefix)
