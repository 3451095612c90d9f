"""Every collective on every dtype and shape, blocking and asynchronous, against NumPy."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from harness.inputs import (
    DTYPES,
    OPS,
    SHAPES,
    Op,
    both_ways,
    close,
    draw,
    dtype_of,
    end,
    means_something,
    reduced,
    same,
    thinned,
)

import mpiddp as dist

pytestmark = [pytest.mark.mpi, pytest.mark.core]

BLOCKS = SHAPES[:5]


@pytest.fixture(params=DTYPES)
def dtype(request):
    return dtype_of(request.param)


def test_all_reduce(world, dtype):
    for op, shape, how in itertools.product(OPS, thinned(world, dtype, SHAPES, (257,)), both_ways()):
        xs = draw(world.rng, world.size, shape, dtype)
        x = xs[world.rank].copy()
        if not means_something(op, dtype):
            with pytest.raises(TypeError):
                dist.all_reduce(x, op, **how)
            assert same(x, xs[world.rank])
            continue
        end(dist.all_reduce(x, op, **how), how)
        assert x.shape == shape
        assert close(x, reduced(op, xs)), (op, shape, how, x, reduced(op, xs))


def test_reduce_leaves_the_others_alone(world, dtype):
    for op, shape, how in itertools.product(OPS, thinned(world, dtype, BLOCKS, (7,)), both_ways()):
        root = int(world.rng.integers(world.size))
        xs = draw(world.rng, world.size, shape, dtype)
        x = xs[world.rank].copy()
        if not means_something(op, dtype):
            with pytest.raises(TypeError):
                dist.reduce(x, root, op, **how)
            continue
        end(dist.reduce(x, root, op, **how), how)
        if world.rank == root:
            assert close(x, reduced(op, xs)), (op, shape, how)
        else:
            assert same(x, xs[world.rank])


def test_reduce_sends_from_read_only_memory(world):
    x = np.full(5, world.rank, np.float32)
    x.flags.writeable = world.rank == 0
    dist.reduce(x, 0)
    assert (x == (sum(range(world.size)) if world.rank == 0 else world.rank)).all()


def test_broadcast(world, dtype):
    for shape, how in itertools.product(thinned(world, dtype, SHAPES, (257,)), both_ways()):
        for root in range(world.size):
            xs = draw(world.rng, world.size, shape, dtype)
            x = xs[world.rank].copy()
            if world.rank == root:
                x.flags.writeable = False
            end(dist.broadcast(x, **{"src": root} if root % 2 else {"group_src": root}, **how), how)
            assert same(x, xs[root])


def test_all_gather(world, dtype):
    for shape, how in itertools.product(thinned(world, dtype, SHAPES, (257,)), both_ways()):
        xs = draw(world.rng, world.size, shape, dtype)
        outputs = [np.zeros_like(x) for x in xs]
        end(dist.all_gather(outputs, xs[world.rank], **how), how)
        assert all(map(same, outputs, xs))


def test_all_gather_of_different_shapes(world, dtype):
    for how in both_ways():
        xs = [draw(world.rng, 1, (rank, 3), dtype)[0] for rank in range(world.size)]
        outputs = [np.zeros_like(x) for x in xs]
        end(dist.all_gather(outputs, xs[world.rank], **how), how)
        assert all(map(same, outputs, xs))


@pytest.mark.parametrize("call", [dist.all_gather_single, dist.all_gather_into_tensor])
def test_all_gather_single(world, dtype, call):
    for shape, how, stacked in itertools.product(thinned(world, dtype, SHAPES, (257,)), both_ways(), (True, False)):
        xs = draw(world.rng, world.size, shape, dtype)
        expected = np.stack(xs) if stacked or not shape else np.concatenate(xs)
        output = np.zeros_like(expected)
        end(call(output, xs[world.rank], **how), how)
        assert same(output, expected)


def test_gather(world, dtype):
    for shape, how in itertools.product(thinned(world, dtype, SHAPES, (257,)), both_ways()):
        root = int(world.rng.integers(world.size))
        xs = draw(world.rng, world.size, shape, dtype)
        outputs = [np.zeros_like(x) for x in xs] if world.rank == root else None
        end(dist.gather(xs[world.rank], outputs, dst=root, **how), how)
        if outputs is not None:
            assert all(map(same, outputs, xs))


def test_gather_of_different_shapes(world):
    for how in both_ways():
        xs = [np.arange(rank * 2.0) + rank for rank in range(world.size)]
        outputs = [np.zeros_like(x) for x in xs] if world.rank == 0 else None
        end(dist.gather(xs[world.rank], outputs, **how), how)
        assert outputs is None or all(map(same, outputs, xs))


def test_scatter(world, dtype):
    for shape, how in itertools.product(thinned(world, dtype, SHAPES, (257,)), both_ways()):
        root = int(world.rng.integers(world.size))
        xs = draw(world.rng, world.size, shape, dtype)
        x = np.zeros(shape, dtype)
        end(dist.scatter(x, xs if world.rank == root else None, group_src=root, **how), how)
        assert same(x, xs[world.rank])


def test_scatter_of_different_shapes(world):
    for how in both_ways():
        xs = [np.arange(rank * 2.0) + rank for rank in range(world.size)]
        x = np.zeros_like(xs[world.rank])
        end(dist.scatter(x, xs if world.rank == 0 else None, **how), how)
        assert same(x, xs[world.rank])


@pytest.mark.parametrize("call", ["reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"])
def test_reduce_scatter(world, dtype, call):
    for op, shape, how in itertools.product(OPS, thinned(world, dtype, BLOCKS, (7,)), both_ways()):
        whole = draw(world.rng, world.size, (world.size, *shape), dtype)
        output = np.zeros(shape, dtype)
        mine = whole[world.rank].copy()
        given = list(mine.copy()) if call == "reduce_scatter" and shape else mine.copy()
        if call == "reduce_scatter" and not shape:
            given = [np.array(each) for each in mine]
        elif call == "reduce_scatter_tensor" and shape:
            given = mine.reshape(-1, *shape[1:]).copy()
        if not means_something(op, dtype):
            with pytest.raises(TypeError):
                getattr(dist, call)(output, given, op, **how)
            continue
        end(getattr(dist, call)(output, given, op, **how), how)
        assert close(output, reduced(op, [each[world.rank] for each in whole]).reshape(shape)), (op, shape, how)
        assert same(np.array(given).reshape(mine.shape), mine), "the input was written to"


def test_all_to_all(world, dtype):
    for how in both_ways():
        # Rank r sends r + 2 s rows to rank s.
        sent = [[draw(world.rng, 1, (r + 2 * s, 2), dtype)[0] for s in range(world.size)] for r in range(world.size)]
        outputs = [np.zeros_like(row[world.rank]) for row in sent]
        end(dist.all_to_all(outputs, sent[world.rank], **how), how)
        assert all(map(same, outputs, [row[world.rank] for row in sent]))


def test_all_to_all_single(world, dtype):
    for shape, how in itertools.product([(world.size,), (2 * world.size, 3), (0,), (world.size, 0)], both_ways()):
        xs = draw(world.rng, world.size, shape, dtype)
        output = np.zeros(shape, dtype)
        end(dist.all_to_all_single(output, xs[world.rank], **how), how)
        assert same(output, np.concatenate([np.split(x, world.size)[world.rank] for x in xs]))


def test_all_to_all_single_uneven(world, dtype):
    for how, tail in itertools.product(both_ways(), [(), (3,)]):
        counts = world.rng.integers(0, 4, (world.size, world.size))
        xs = [draw(world.rng, 1, (int(row.sum()), *tail), dtype)[0] for row in counts]
        blocks = [np.split(x, np.cumsum(row)[:-1])[world.rank] for x, row in zip(xs, counts, strict=True)]
        expected = np.concatenate(blocks)
        output = np.zeros_like(expected)
        received, sent = counts[:, world.rank].tolist(), counts[world.rank].tolist()
        end(dist.all_to_all_single(output, xs[world.rank], received, sent, **how), how)
        assert same(output, expected)


@pytest.mark.parametrize("count", [3, 2_000, 60_000, 700_000])
@pytest.mark.parametrize("block", ["own", "first", "last"])
def test_output_within_the_input_and_the_other_way_round(world, count, block):
    mine = {"own": world.rank, "first": 0, "last": world.size - 1}[block]
    for how, empty in itertools.product(both_ways(), [np.empty, dist.symmetric_empty]):
        whole = empty((world.size, count))
        whole[mine] = world.rank
        end(dist.all_gather_single(whole, whole[mine], **how), how)
        assert (whole == np.arange(world.size)[:, None]).all()
        whole[...] = np.arange(world.size)[:, None] + world.rank
        end(dist.reduce_scatter_single(whole[mine], whole, **how), how)
        assert (whole[mine] == world.size * world.rank + sum(range(world.size))).all()


@pytest.mark.parametrize("count", [3, 20_000, 700_000])
def test_exchange_in_place(world, count):
    given = np.arange(world.size)[:, None] + 10.0 * world.rank
    for how in both_ways():
        whole = np.tile(given, count)
        end(dist.all_to_all_single(whole, whole, **how), how)
        assert (whole == world.rank + 10 * np.arange(world.size)[:, None]).all()
        whole[...] = given
        end(dist.all_to_all(list(whole), list(whole), **how), how)
        assert (whole == world.rank + 10 * np.arange(world.size)[:, None]).all()
        whole[...] = given
        root = world.rank == 0
        end(dist.scatter(whole[-1], list(whole) if root else None, **how), how)
        assert (whole[-1] == world.rank).all()


def test_barrier(world):
    for how in both_ways():
        end(dist.barrier(**how), how)
    dist.barrier(timeout=30)
    dist.barrier(device_ids=[0])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("op", [Op.MIN, Op.MAX], ids=str)
def test_nan_comes_through(world, dtype, op):
    dtype = dtype_of(dtype)
    for n in (1, 2, 7, 64, 1000, 5003, 70_001):
        xs = [np.full(n, rank + 1.0).astype(dtype) for rank in range(world.size)]
        places = world.rng.integers(n, size=world.size)
        for rank, place in enumerate(places):
            xs[rank][place] = np.nan
        x = xs[world.rank].copy()
        dist.all_reduce(x, op)
        expected = np.full(n, 1.0 if op == Op.MIN else world.size).astype(dtype)
        expected[places] = np.nan
        assert same(x, expected), n
        for how in both_ways():
            x = xs[world.rank].copy()
            end(dist.reduce(x, 0, op, **how), how)
            assert world.rank or same(x, expected)


def test_premul_sum_takes_each_ranks_factor(world):
    x = np.array([2.0, 4.0])
    dist.all_reduce(x, Op.PREMUL_SUM(world.rank + 0.5))
    assert (x == np.array([2.0, 4.0]) * sum(rank + 0.5 for rank in range(world.size))).all()


def test_tensors_that_hold_an_array(world):
    class Holder:
        def __init__(self, x):
            self.__mpiddp_array__ = x

    x = Holder(np.ones(3))
    dist.all_reduce(x)
    assert (x.__mpiddp_array__ == world.size).all()


def test_arrays_that_mpi_cannot_name(world):
    when = np.array([f"2026-01-{rank + 1:02}" for rank in range(world.size)], "datetime64[D]")
    output = np.empty(world.size, when.dtype)
    dist.all_gather_single(output, when[world.rank : world.rank + 1])
    assert (output == when).all()
    record = np.zeros(2, [("a", np.int16), ("b", np.float64)])
    record["a"], record["b"] = world.rank, 0.5
    dist.broadcast(record, world.size - 1)
    assert record["a"].tolist() == [world.size - 1] * 2
    with pytest.raises(TypeError, match="numbers"):
        dist.all_reduce(record)


def test_floats_of_eight_bits_are_moved_and_not_reduced(world):
    eight = pytest.importorskip("ml_dtypes").float8_e5m2  # of kind "f" for NumPy, unlike the others
    for count in (3, 100_000, 3_000_000):
        x = np.full(count, world.rank + 1).astype(eight)
        dist.broadcast(x, world.size - 1)
        assert (x.astype(np.float32) == world.size).all()
        output = np.zeros((world.size, count), eight)
        dist.all_gather_single(output, x, algorithm="native")
        assert (output.astype(np.float32) == world.size).all()
        for call in (dist.all_reduce, lambda x: dist.reduce(x, 0)):
            with pytest.raises(TypeError, match="numbers or booleans, got float8_e5m2"):
                call(x)


def test_arrays_that_were_pickled(world):
    for dtype in (np.float16, np.float32, np.float64):
        x = pickle.loads(pickle.dumps(np.arange(3, dtype=dtype)))
        assert x.dtype.isbuiltin != np.dtype(dtype).isbuiltin, "NumPy tells them apart"
        dist.all_reduce(x, op=dist.ReduceOp.PREMUL_SUM(2.0**-7))  # a factor that no other test has
        assert x.tolist() == [0, 2.0**-7 * world.size, 2.0**-6 * world.size]
