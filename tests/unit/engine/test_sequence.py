"""A sequence ends exactly at an end-of-sequence id or its limit, wherever in a commit that falls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.engine.sequence import TargetSequence
from vidspec_service.engine.types import FinishReason


@given(chunks=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=20), limit=st.integers(1, 20))
def test_committed_tokens_stop_at_the_first_end_or_the_limit(chunks: list[list[int]], limit: int) -> None:
    sequence = TargetSequence(frozenset({0}), limit)
    for chunk in chunks:
        if sequence.finish_reason is None:
            sequence.commit(chunk)
    flat = [token for chunk in chunks for token in chunk]
    end = flat.index(0) + 1 if 0 in flat else len(flat)
    assert sequence.committed == flat[: min(end, limit)]
    if end <= limit and 0 in flat:
        assert sequence.finish_reason is FinishReason.STOP
    elif len(flat) >= limit:
        assert sequence.finish_reason is FinishReason.LENGTH
    else:
        assert sequence.finish_reason is None


def test_nothing_is_committed_after_the_end() -> None:
    sequence = TargetSequence(frozenset({0}), 5)
    sequence.commit([3, 0])
    with pytest.raises(ValueError, match="has ended"):
        sequence.commit([1])
