import tracemalloc

import numpy as np
import pytest
from harness.pretend import pretended_nodes

import mpiddp as dist


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_long_array_takes_the_memory_of_few_pieces(world):
    x = np.ones(64 << 17)
    with pretended_nodes(range(world.size)):
        dist.all_reduce(np.ones(1 << 17), algorithm="hierarchical")
        tracemalloc.start()
        dist.all_reduce(x, algorithm="hierarchical")
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (x == world.size).all() and peak_bytes < 16 << 20
