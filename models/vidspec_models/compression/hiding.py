"""Hiding rows of a cache from its later layers, and bringing them back, without a second copy of any row.

Attention does not mind the order of keys (their positions are turned into them), so the later layers keep what is
hidden in their first places and attend to the rest: one contiguous part, that is really less to read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vidspec_models.kv_cache import HiddenRows, KVCache


def begin_hiding(cache: KVCache, hidden: Tensor, first_layer: int, span: int, attention: Tensor) -> None:
    """Hide rows (int64, sorted) of the first `span` rows from `first_layer` on; `attention` is what chose them."""
    places = torch.arange(span, device=hidden.device)
    state = HiddenRows(first_layer, len(hidden), places, attention)
    _move(cache, state, places.clone(), torch.cat((hidden, places[~torch.isin(places, hidden)])))
    cache.hidden = state


def change_hidden(cache: KVCache, state: HiddenRows, hidden: Tensor, attention: Tensor) -> None:
    """Hide these rows instead of the present ones, as many and within the same span."""
    if len(hidden) != state.count:
        raise ValueError(f"{state.count} rows are hidden; that cannot become {len(hidden)}")
    is_wanted = torch.isin(state.order, hidden)
    is_hidden = torch.arange(len(state.order), device=hidden.device) < state.count
    returning = (is_hidden & ~is_wanted).nonzero()[:, 0]
    leaving = (~is_hidden & is_wanted).nonzero()[:, 0]
    _move(cache, state, torch.cat((returning, leaving)), torch.cat((leaving, returning)))
    state.attention = attention


def _move(cache: KVCache, state: HiddenRows, to: Tensor, source: Tensor) -> None:
    """Put what lies in places `source` into places `to`; the two name the same places."""
    for extent in cache.extents:
        there, whence = to.to(extent.keys.device), source.to(extent.keys.device)
        for stored in (extent.keys, extent.values):
            layers = stored[max(0, state.first_layer - extent.layers.start) :]
            layers[:, :, :, there] = layers[:, :, :, whence]
    state.order[to] = state.order[source]
