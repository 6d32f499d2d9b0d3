"""Padding of rows and of attention changes no row's result."""

import pytest
import torch

from vidspec_models.decoder.batch_invariant_ops import BatchInvariance, CausalMasks, attend, attend_causally


@pytest.mark.parametrize("num_rows", [1, 2, 5, 9])
def test_lines_added_as_padding_change_no_row(num_rows: int) -> None:
    group, block, start = 3, 64, 70
    keys, values = torch.randn(2, 1, 2, 128, 16)
    queries = torch.randn(num_rows, 2 * group, 16)

    def attended(lines: int) -> torch.Tensor:
        masks = CausalMasks(256, block, group, keys.dtype, keys.device, lines)
        context = masks.padded(start + num_rows)
        visible = keys[:, :, :context], values[:, :, :context]
        return attend(queries, *visible, masks.rows(start, num_rows), 0.25)

    torch.testing.assert_close(attended(16), attended(1))


@pytest.mark.parametrize(("num_rows", "num_lines"), [(1, 16), (5, 16), (6, 32)])
def test_a_mask_has_whole_groups_of_lines_and_repeats_the_last(num_rows: int, num_lines: int) -> None:
    mask = CausalMasks(256, 64, 3, torch.float32, torch.device("cpu"), 16).rows(70, num_rows)
    assert mask.shape == (num_lines, 128)
    assert (mask[num_rows * 3 - 1 :] == mask[num_rows * 3 - 1]).all()


def test_rows_are_padded_to_the_next_bucket_and_beyond_the_last_left_alone() -> None:
    rule = BatchInvariance(min_rows=16, context_block=256, holds=True, row_buckets=(16, 64))
    assert [rule.padded(count) for count in (1, 16, 17, 64, 65, 512)] == [16, 16, 64, 64, 65, 512]


def test_attention_without_a_mask_is_causal_over_the_end_of_a_context() -> None:
    generator = torch.Generator().manual_seed(6)
    queries = torch.randn(5, 4, 16, generator=generator)
    keys, values = torch.randn(2, 1, 2, 9, 16, generator=generator)
    masked = attend(queries, keys, values, CausalMasks(16, 1, 2, torch.float32, keys.device).rows(4, 5), 0.25)
    assert torch.allclose(attend_causally(queries, keys, values, 0.25), masked, atol=1e-6)
