import numpy as np
import pytest
from harness.inputs import Op, same

import mpiddp as dist

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3), pytest.mark.core]

SHAPES = [(3,), (), (2, 5), (0,), (280_001,)]
DTYPES = [np.float32, np.float64, np.int64, np.float16]


def arrays(value):
    return [np.full(shape, value, dtype) for shape in SHAPES for dtype in DTYPES]


@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce_coalesced(world, async_op):
    xs = arrays(world.rank + 1)
    future = dist.all_reduce_coalesced(xs, Op.MAX, async_op=async_op)
    if async_op:
        assert isinstance(future, dist.Future)
        assert all(map(same, future.wait(), arrays(world.size)))
    else:
        assert future is None
    assert all(map(same, xs, arrays(world.size)))


def test_coalesced_refuses(world):
    x = np.ones(2)
    for given, op in (([], Op.SUM), (x, Op.SUM), ([x, None], Op.SUM), ([x, np.ones(2, int)], Op.AVG)):
        with pytest.raises(TypeError):
            dist.all_reduce_coalesced(given, op)
    dist.barrier()
