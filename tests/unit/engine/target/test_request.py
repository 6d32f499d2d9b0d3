"""A sequence ends exactly at an end-of-sequence id or its limit, wherever in a commit that falls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.requests import target_request
from vidspec_service.engine.types import FinishReason


@given(chunks=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=20), limit=st.integers(1, 20))
def test_committed_tokens_stop_at_the_first_end_or_the_limit(chunks: list[list[int]], limit: int) -> None:
    request = target_request(stop_ids=frozenset({0}), max_tokens=limit)
    for chunk in chunks:
        if request.finish_reason is None:
            request.commit(chunk)
    flat = [token for chunk in chunks for token in chunk]
    end = flat.index(0) + 1 if 0 in flat else len(flat)
    assert request.committed == flat[: min(end, limit)]
    if end <= limit and 0 in flat:
        assert request.finish_reason is FinishReason.STOP
    elif len(flat) >= limit:
        assert request.finish_reason is FinishReason.LENGTH
    else:
        assert request.finish_reason is None


def test_nothing_is_committed_after_the_end() -> None:
    request = target_request(stop_ids=frozenset({0}), max_tokens=5)
    request.commit([3, 0])
    with pytest.raises(ValueError, match="has ended"):
        request.commit([1])
