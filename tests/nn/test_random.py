"""The two streams of random numbers: values for all ranks alike, dropout for each its own."""

from collections.abc import Iterator

import numpy as np
import pytest

from mpiddp import nn
from mpiddp.nn import functional as F  # noqa: N812


@pytest.fixture(autouse=True)
def streams() -> Iterator[None]:
    yield
    nn.random.set_stream(0)
    nn.manual_seed(0)


def mask(n: int = 1000) -> np.ndarray:
    return F.dropout(np.ones(n, np.float32)).data


def test_seed_is_an_integer() -> None:
    with pytest.raises(TypeError, match=r"seed has to be an integer, got 0\.5"):
        nn.manual_seed(0.5)  # type: ignore[arg-type]
    nn.manual_seed(np.int64(-1))  # type: ignore[arg-type]


def test_ranks_share_values_and_not_dropout() -> None:
    values, masks = set(), set()
    for rank in range(3):
        nn.random.set_stream(rank)
        nn.manual_seed(5)
        masks.update(mask().tobytes() for _ in range(rank + 1))  # which do not move the values
        values.add(nn.Linear(20, 20).weight.data.tobytes())
    nn.manual_seed(6)
    assert len(values) == 1 and nn.Linear(20, 20).weight.data.tobytes() not in values
    assert len(masks) == 1 + 2 + 3


def test_order_of_seed_and_rank_does_not_matter() -> None:
    nn.random.set_stream(2)
    nn.manual_seed(5)
    first = mask()
    nn.random.set_stream(0)
    nn.manual_seed(5)
    nn.random.set_stream(2)
    np.testing.assert_array_equal(mask(), first)
    second = mask()
    nn.random.set_stream(2)  # not a new start
    assert (mask() != first).any() and (second != first).any()


def test_masks_of_a_step_follow_from_seed_rank_and_step_alone():
    """So a rank that takes the place of a dead one draws its masks."""

    def masks(stream: int, step: int, drawn_before: int) -> list[bytes]:
        nn.manual_seed(5)
        nn.random.set_stream(stream)
        for _ in range(drawn_before):
            mask(7)
        nn.random.set_step(step)
        return [mask().tobytes() for _ in range(2)]

    assert masks(1, 3, drawn_before=0) == masks(1, 3, drawn_before=4)
    drawn = [each for stream in (0, 1) for step in (0, 1, 3) for each in masks(stream, step, 1)]
    assert len(set(drawn)) == len(drawn)
