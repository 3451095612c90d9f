from __future__ import annotations

import pickle

import numpy as np
import pytest

import mpiddp as dist

from .inputs import Op, same

pytestmark = pytest.mark.core

SHAPES = [(3,), (), (2, 5), (0,), (70_001,)]
DTYPES = [np.float32, np.float64, np.int64, np.float16]


def arrays(value, shapes=SHAPES):
    return [np.full(shape, value, dtype) for shape in shapes for dtype in DTYPES]


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


@pytest.mark.parametrize("async_op", [False, True])
def test_all_gather_coalesced(world, async_op):
    outputs = [arrays(-1) for _ in range(world.size)]
    future = dist.all_gather_coalesced(outputs, arrays(world.rank), async_op=async_op)
    if async_op:
        future.wait()
    for rank, found in enumerate(outputs):
        assert all(map(same, found, arrays(rank)))


def test_coalesced_refuses(world):
    x = np.ones(2)
    for call, error in (
        (lambda: dist.all_reduce_coalesced([]), TypeError),
        (lambda: dist.all_reduce_coalesced(x), TypeError),
        (lambda: dist.all_reduce_coalesced([x, None]), TypeError),
        (lambda: dist.all_reduce_coalesced([x, np.ones(2, int)], Op.AVG), TypeError),
        (lambda: dist.all_gather_coalesced([[x]] * (world.size + 1), [x]), ValueError),
        (lambda: dist.all_gather_coalesced([[x, x]] * world.size, [x]), ValueError),
        (lambda: dist.all_gather_coalesced([[x[:1]]] * world.size, [x]), ValueError),
        (lambda: dist.all_gather_coalesced(None, [x]), TypeError),
    ):
        with pytest.raises(error):
            call()
    dist.barrier()


@pytest.mark.parametrize("async_ops", [False, True])
def test_manager(world, async_ops):
    group = dist.new_group()
    xs = arrays(world.rank + 1.0)
    untouched = np.full(1, float(world.rank))
    with dist._coalescing_manager(group, async_ops=async_ops) as manager:
        for x in xs:
            assert dist.all_reduce(x, group=group) is None
        assert same(xs[0], arrays(world.rank + 1.0)[0]), "it must not be made before the end"
        dist.all_reduce(untouched)  # another group's
    if async_ops:
        manager.wait()
    assert all(map(same, xs, arrays(world.size * (world.size + 1) / 2)))
    assert untouched[0] == sum(range(world.size))

    inputs = [np.full(n, world.rank, dtype) for n in (2, 5) for dtype in (np.float32, np.int8)]
    outputs = [np.zeros(world.size * x.size, x.dtype) for x in inputs]
    with dist._coalescing_manager(group, async_ops=async_ops) as manager:
        for output, x in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, x, group=group)
    manager.wait()
    for output, x in zip(outputs, inputs, strict=True):
        assert same(output, np.repeat(np.arange(world.size), x.size).astype(x.dtype))

    inputs, outputs = outputs, inputs
    with dist._coalescing_manager(group, async_ops=async_ops) as manager:
        for output, x in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, x, group=group)
    manager.wait()
    assert all((output == world.rank * world.size).all() for output in outputs)
    dist.destroy_process_group(group)


def test_manager_refuses(world):
    x = np.ones(2)
    with dist._coalescing_manager():
        illegal = dist.all_reduce(x, async_op=True)
        with pytest.raises(ValueError, match="Illegal to call wait on IllegalWork"):
            illegal.wait()
        with pytest.raises(ValueError, match="IllegalWork"):
            illegal.is_completed()
    assert (x == world.size).all()
    with pytest.raises(RuntimeError, match="to be the same"), dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_gather_single(np.zeros(2 * world.size), x)
    with pytest.raises(RuntimeError, match="to be the same"), dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x, Op.MAX)
    with pytest.raises(ValueError, match="non-empty"), dist._coalescing_manager(), dist._coalescing_manager():
        pass
    with dist._coalescing_manager():
        pass
    x[:] = 1
    dist.all_reduce(x)
    assert (x == world.size).all()


def test_factors_are_equal_when_their_values_are(world):
    assert Op.PREMUL_SUM(0.5) is Op.PREMUL_SUM(0.5)
    assert Op.PREMUL_SUM(0.5) is not Op.PREMUL_SUM(0.25)
    assert Op.PREMUL_SUM(0.0) is not Op.PREMUL_SUM(-0.0)
    assert pickle.loads(pickle.dumps(Op.PREMUL_SUM(0.5))) is Op.PREMUL_SUM(0.5)
    xs = [np.ones(3), np.ones(5)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x, Op.PREMUL_SUM(0.5))
    assert all((x == world.size / 2).all() for x in xs)
    with pytest.raises(RuntimeError, match="same reduction"), dist._coalescing_manager():
        dist.all_reduce(xs[0], Op.PREMUL_SUM(0.5))
        dist.all_reduce(xs[1], Op.PREMUL_SUM(0.25))
