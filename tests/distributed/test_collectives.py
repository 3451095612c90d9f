"""Every collective on every dtype and shape, blocking and asynchronous, against NumPy."""

import itertools
import pickle

import numpy as np
import pytest
from harness.collectives import COLLECTIVES, REDUCTIONS, UNEVEN, check
from harness.inputs import DTYPES, OPS, SHAPES, both_ways, dtype_of, end, thinned

import mpiddp as dist

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.core]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_blocks(world, dtype):
    dtype = dtype_of(dtype)
    shapes = thinned(world, dtype, SHAPES, (257,))
    for name, how in itertools.product(COLLECTIVES, both_ways()):
        # Reductions and shapes do not depend on each other.
        for op in OPS if name in REDUCTIONS else ():
            check(world, name, dtype, (31, 37), how, op=op)
        for shape in shapes:
            check(world, name, dtype, shape, how)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_different_shapes(world, dtype):
    counts = world.rng.integers(0, 4, (world.size, world.size)).tolist()
    for name, how, tail in itertools.product(UNEVEN, both_ways(), [(), (3,)]):
        check(world, name, dtype_of(dtype), lambda s, r, tail=tail: (counts[s][r], *tail), how)


def test_the_root_sends_and_the_others_reduce_from_read_only_memory(world):
    for root in range(world.size):
        for call, writes in ((dist.broadcast, world.rank != root), (dist.reduce, world.rank == root)):
            x = np.full(5, world.rank, np.float32)
            x.flags.writeable = writes
            call(x, root)
            expected = root if call is dist.broadcast else sum(range(world.size)) if writes else world.rank
            assert (x == expected).all()


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
