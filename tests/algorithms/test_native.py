"""Blocks by messages, on a made-up rank: a block that comes early is for the operation at the head of the queue."""

from collections import deque
from typing import Any

import made_up
import numpy as np

from mpiddp.algorithms import native
from mpiddp.mpi.link import Channel


def test_an_operation_takes_no_block_before_its_turn() -> None:
    with made_up.mpi(2):
        comm: Any = made_up.Comm(2, 0, 1)
        link, block = Channel((0, 1), 0, comm, comm), np.arange(8, dtype=np.uint8)
        outputs = [np.zeros_like(block) for _ in range(2)]
        first, second = (native._exchange(link, "gather", [(1, output)], ()) for output in outputs)
        next(first)
        link.early[link.now.handle] = {1: deque([(made_up.Message(block), block.nbytes)])}  # type: ignore[list-item]
        next(second)
        assert link.early[link.now.handle], "it is not the last one's"
        next(first)
    assert not link.early[link.now.handle] and [output.any() for output in outputs] == [True, False]
