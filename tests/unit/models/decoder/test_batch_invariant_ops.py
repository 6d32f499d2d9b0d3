"""The rule about shapes, and attention with and without a mask."""

import torch

from vidspec_models.decoder.batch_invariant_ops import BatchInvariance, CausalMasks, attend, attend_causally


def test_rows_are_padded_to_the_next_bucket_and_beyond_the_last_left_alone() -> None:
    rule = BatchInvariance(min_rows=16, context_block=256, holds=True, row_buckets=(16, 64))
    assert [rule.padded(count) for count in (1, 16, 17, 64, 65, 512)] == [16, 16, 64, 64, 65, 512]


def test_attention_without_a_mask_is_causal_over_the_end_of_a_context() -> None:
    generator = torch.Generator().manual_seed(6)
    queries = torch.randn(5, 4, 16, generator=generator)
    keys, values = torch.randn(2, 1, 2, 9, 16, generator=generator)
    masked = attend(queries, keys, values, CausalMasks(16, 1, 2, torch.float32, keys.device).rows(4, 5), 0.25)
    assert torch.allclose(attend_causally(queries, keys, values, 0.25), masked, atol=1e-6)
