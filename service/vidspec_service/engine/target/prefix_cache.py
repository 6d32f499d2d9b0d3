"""PrefixCache: the beginnings of ended prompts, so that another question about a video does not prefill it again.

A prefix is whole prefill chunks, and what follows is prefilled in the chunks it would have had: every row has the
bits of a fresh prefill, so an answer does not depend on what was asked before. Room is lent: whoever needs it evicts
a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from vidspec_models.decoder.kv_cache import KVCache, KVPool
from vidspec_models.inputs import Prompt, PromptIdentity


@dataclass(frozen=True, slots=True)
class _Prefix:
    identity: PromptIdentity
    cache: KVCache

    def num_common(self, other: PromptIdentity) -> int:
        """Rows that both begin with; none if one speaks of another video than the other."""
        if any(ours != theirs for ours, theirs in zip(self.identity.video_keys, other.video_keys, strict=False)):
            return 0
        most = min(self.cache.length, len(other.rows))
        differ = self.identity.rows[:most] != other.rows[:most]
        return int(differ.argmax()) if differ.any() else most


class PrefixCache:
    """The most recently used come last; the first to be dropped is the first."""

    def __init__(self, pool: KVPool, prefill_chunk: int) -> None:
        self._pool = pool
        self._chunk = prefill_chunk
        self._kept: list[_Prefix] = []

    def keep(self, prompt: Prompt, cache: KVCache) -> None:
        """Take over the cache of a request that has ended: its beginning stays, if it can serve another."""
        num_rows = prompt.num_tokens // self._chunk * self._chunk
        identity = prompt.identity
        is_whole = cache.hidden is None and cache.length >= num_rows
        if identity is None or not is_whole or not self._is_new(identity, num_rows):
            self._pool.release(cache)
            return
        self._pool.shrink(cache, num_rows)
        self._kept.append(_Prefix(identity, cache))

    def begin(self, prompt: Prompt, cache: KVCache) -> int:
        """Copy the longest known beginning of a prompt into its empty cache; returns the number of rows."""
        identity = prompt.identity
        if identity is None or not self._kept:
            return 0
        found = max(self._kept, key=lambda prefix: prefix.num_common(identity))
        # The last row is always computed: the first token comes from it.
        num_rows = min(found.num_common(identity), prompt.num_tokens - 1) // self._chunk * self._chunk
        if not num_rows or not self._pool.grow(cache, num_rows):
            return 0
        cache.copy_rows(found.cache, num_rows)
        self._use(found)
        return num_rows

    def evict(self) -> bool:
        """Drop the one that was not used for the longest time; False if there is none."""
        if not self._kept:
            return False
        self._pool.release(self._kept.pop(0).cache)
        return True

    def _is_new(self, identity: PromptIdentity, num_rows: int) -> bool:
        """Whether it would add anything; a known one that holds it counts as used."""
        for prefix in self._kept:
            if prefix.num_common(identity) >= num_rows:
                self._use(prefix)
                return False
        return num_rows > 0

    def _use(self, prefix: _Prefix) -> None:
        self._kept = [other for other in self._kept if other is not prefix]
        self._kept.append(prefix)
