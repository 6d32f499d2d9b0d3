"""What attention's padding may change: nothing that a row sees."""

import pytest
import torch

from vidspec_models.attention import CausalMasks, attend


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
