"""Convolutions in blocks."""

from typing import Any

import numpy as np
import pytest
from harness.oracle import compare, draw

import mpiddp.nn.functional as F  # noqa: N812
from mpiddp.nn import conv
from mpiddp.nn.window import Window

from .test_functional import CONVOLUTIONS

LIMITS = [(0, 0, 1), (0, 10**9, 1), (10**9, 600, 1), (3000, 600, 2), (3000, 0, 1)]


@pytest.mark.parametrize(("cache", "unpacked", "least"), LIMITS)
def test_conv2d_is_the_same_in_blocks(
    torch: Any, cache: int, unpacked: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, parts = set(), set()
    whole = conv.Columns.gather

    def gather(self: conv.Columns, image: Any, seen: slice) -> Any:
        block = whole(self, image, seen)
        rows.add(seen.stop - seen.start)
        parts.add(block.shape[1])
        return block

    monkeypatch.setattr(conv.Columns, "gather", gather)
    for name, limit in (("_CACHE_BYTES", cache), ("_UNPACKED", unpacked), ("_LEAST_COLUMNS", least)):
        monkeypatch.setattr(conv, name, limit)
    for image, kernel, *options in CONVOLUTIONS:
        inputs = [*draw((5, *image[1:]), kernel, kernel[:1]), *options]
        compare(F.conv2d, torch.nn.functional.conv2d, inputs, tolerance=1e-12)
    assert (rows == {1}) == (cache == 0) and (len(parts) > 1) == (unpacked == 600)


def test_conv2d_of_many_images_is_cut(torch) -> None:
    compare(F.conv2d, torch.nn.functional.conv2d, [*draw((48, 6, 17, 16), (20, 6, 5, 5)), None], "float64")
    cut = conv.Columns(Window((17, 16), (5, 5), (1, 1), (0, 0)), np.zeros((6, 17, 16, 48)), 20)
    assert len(list(cut.blocks())) > 1 and cut.gather(np.zeros((6, 17, 16, 48)), slice(0, 1)).shape[1] > 1
