"""Keys and values: one cache per request, grown in blocks from a shared budget. A rollback changes only one number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_RESERVE = 256  # rows reserved for the rest of an answer


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Consecutive layers on one device."""

    device: torch.device
    layers: range


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """Sizes and placement of one model's caches."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device  # of the first layer
    context_block: int  # capacity and attended length are multiples of this (see `BatchInvariance`)
    split: tuple[LayerSpan, ...] = ()  # if layers are on several devices; empty: all on `device`

    @property
    def spans(self) -> tuple[LayerSpan, ...]:
        """All layers by device, in order."""
        return self.split or (LayerSpan(self.device, range(self.num_layers)),)

    @property
    def device_names(self) -> str:
        """The devices as an operator lists them: "cuda:0,cuda:1"."""
        return ",".join(str(span.device) for span in self.spans)

    def bytes_per_token(self) -> int:
        """Keys and values of one position over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def bytes_per_token_on(self, device: torch.device) -> int:
        """Like `bytes_per_token`, only for the layers on one device."""
        num_layers = sum(len(span.layers) for span in self.spans if span.device == device)
        return self.bytes_per_token() * num_layers // self.num_layers

    def padded(self, num_tokens: int) -> int:
        """Rounded up to whole blocks."""
        return -(-num_tokens // self.context_block) * self.context_block


@dataclass(slots=True)
class HiddenRows:
    """Rows that later layers store but do not attend to, for DyCoke's second stage.

    Layers from `first_layer` on keep the hidden rows in their first `count` places. `order` says which row is in each
    of the first R places of these layers; from place R on, rows are in their own places.
    """

    first_layer: int
    count: int
    order: Tensor  # int64 [R]
    attention: Tensor  # float32 [candidates]: the attention by which the rows were chosen


class KVCache:
    """Contiguous keys and values of one sequence: a pair of arrays per device with layers, all of the same capacity.

    Rows at or beyond `length` are stale, and every reader masks them; storage starts as zeros so that a masked row
    can never introduce a NaN.
    """

    def __init__(self, geometry: CacheGeometry, num_tokens: int) -> None:
        self._geometry = geometry
        self._spans = geometry.spans
        self.length = 0
        self.hidden: HiddenRows | None = None
        # A second copy of the keys of the first `num_columns` rows, in the layout of the CPU kernels (see `CpuStep`).
        self.key_columns: Tensor | None = None
        self.num_columns = 0
        # Per span of layers: [layers, 1, KV heads, capacity, head dim].
        self.keys_by_span = [self._zeros(span, num_tokens) for span in self._spans]
        self.values_by_span = [self._zeros(span, num_tokens) for span in self._spans]

    def _zeros(self, span: LayerSpan, num_tokens: int) -> Tensor:
        geometry = self._geometry
        shape = (len(span.layers), 1, geometry.num_kv_heads, geometry.padded(num_tokens), geometry.head_dim)
        return torch.zeros(shape, dtype=geometry.dtype, device=span.device)

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self.keys_by_span[0].shape[3]

    @property
    def keys(self) -> Tensor:
        """Keys of all layers; raises ValueError if the layers are on several devices."""
        (keys,) = self.keys_by_span
        return keys

    @property
    def values(self) -> Tensor:
        """Values of all layers, like `keys`."""
        (values,) = self.values_by_span
        return values

    def keys_of(self, layers: range) -> Tensor:
        """Keys [layers * KV heads, capacity, head dim] of successive layers on one device, on that device."""
        number = next(number for number, span in enumerate(self._spans) if layers.start in span.layers)
        first = layers.start - self._spans[number].layers.start
        return self.keys_by_span[number][first : first + len(layers)].flatten(0, 2)

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} rows to {length}")
        self.length = length
        self.num_columns = min(self.num_columns, length)
        if self.hidden is not None and length < len(self.hidden.order):
            if length:
                raise ValueError(f"the first {len(self.hidden.order)} rows are out of order: only all can be forgotten")
            self.hidden = None

    def resize(self, num_tokens: int) -> None:
        """Move to storage of another size, one array after the other; the rows up to `length` are kept."""
        if num_tokens < self.length:
            raise ValueError(f"cannot resize a cache of {self.length} rows to {num_tokens}")
        for number, span in enumerate(self._spans):
            for stored in (self.keys_by_span, self.values_by_span):
                fresh = self._zeros(span, num_tokens)
                fresh[:, :, :, : self.length] = stored[number][:, :, :, : self.length]
                stored[number] = fresh
        self.key_columns, self.num_columns = None, 0

    def copy_rows(self, other: KVCache, num_rows: int) -> None:
        """Copy the first `num_rows` rows of another cache into this empty one; raises ValueError if they do not fit."""
        if self.length or num_rows > min(self.capacity, other.length):
            raise ValueError(f"cannot begin a cache of {self.length} rows with {num_rows} rows of {other.length}")
        mine, theirs = self.keys_by_span + self.values_by_span, other.keys_by_span + other.values_by_span
        for to, source in zip(mine, theirs, strict=True):
            to[:, :, :, :num_rows] = source[:, :, :, :num_rows]
        self.length = num_rows


class KVPool:
    """The budget of tokens that all caches of a device share; counts capacity, not length."""

    def __init__(self, geometry: CacheGeometry, num_tokens: int) -> None:
        self.geometry = geometry
        self.num_tokens = num_tokens // geometry.context_block * geometry.context_block
        self.num_used = 0
        self.num_lent = 0  # part of `num_used`: caches that are released as soon as their room is needed

    @property
    def usage(self) -> float:
        """Share of the budget in use and not just lent, 0 to 1."""
        return (self.num_used - self.num_lent) / self.num_tokens if self.num_tokens else 0.0

    def new_cache(self) -> KVCache:
        """A new empty cache; uses none of the budget yet."""
        return KVCache(self.geometry, 0)

    def fits(self, num_tokens: int) -> bool:
        """Whether the budget has room for a new cache of this size now."""
        return self.num_used + self.geometry.padded(num_tokens) <= self.num_tokens

    def grow(self, cache: KVCache, num_tokens: int) -> bool:
        """Make room for `num_tokens` rows in total; False if the budget is too small. Takes more if much is free, since
        moving a cache to other storage takes as long as a forward.
        """
        if num_tokens <= cache.capacity:
            return True
        block = self.geometry.context_block
        for reserve, limit in ((_RESERVE, self.num_tokens // 2), (block, self.num_tokens), (0, self.num_tokens)):
            wanted = num_tokens + reserve
            more = self.geometry.padded(wanted) - cache.capacity
            if self.num_used + more <= limit:
                cache.resize(wanted)
                self.num_used += more
                return True
        return False

    def shrink(self, cache: KVCache, num_tokens: int) -> None:
        """Keep the first `num_tokens` rows and give back the rest."""
        self.num_used -= cache.capacity
        cache.truncate(num_tokens)
        cache.resize(num_tokens)
        self.num_used += cache.capacity

    def release(self, cache: KVCache) -> None:
        """Give back everything; the cache is empty afterwards."""
        self.shrink(cache, 0)
