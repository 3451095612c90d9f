"""Arrays with more elements than MPI can count, represented by a small pretended limit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from harness.inputs import Op, both_ways, draw, end, reduced, same

import mpiddp as dist
from mpiddp.mpi import message

pytestmark = [pytest.mark.mpi, pytest.mark.core]

SHAPES = [(40,), (41,), (100,), (3, 39)]


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch):
    monkeypatch.setattr(message, "MAX_COUNT", 40)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16, np.int8])
def test_reductions(world, dtype):
    for shape, how, op in itertools.product(SHAPES, both_ways(), (Op.SUM, Op.MAX)):
        xs = draw(world.rng, world.size, shape, np.dtype(dtype))
        x = xs[world.rank].copy()
        end(dist.all_reduce(x, op, **how), how)
        assert same(x, reduced(op, xs))
        x = xs[world.rank].copy()
        end(dist.reduce(x, 0, op, **how), how)
        assert same(x, reduced(op, xs) if world.rank == 0 else xs[world.rank])
        whole = draw(world.rng, world.size, (world.size, *shape), np.dtype(dtype))
        output = np.zeros(shape, dtype)
        end(dist.reduce_scatter_single(output, whole[world.rank], op, **how), how)
        assert same(output, reduced(op, [each[world.rank] for each in whole]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_movements(world, dtype):
    for shape, how in itertools.product(SHAPES, both_ways()):
        xs = draw(world.rng, world.size, shape, np.dtype(dtype))
        mine = xs[world.rank]
        x = mine.copy()
        end(dist.broadcast(x, world.size - 1, **how), how)
        assert same(x, xs[-1])
        output = np.zeros((world.size, *shape), dtype)
        end(dist.all_gather_single(output, mine, **how), how)
        assert same(output, np.stack(xs))
        outputs = [np.zeros_like(x) for x in xs]
        end(dist.all_gather(outputs, mine, **how), how)
        assert all(map(same, outputs, xs))
        outputs = [np.zeros_like(x) for x in xs] if world.rank == 0 else None
        end(dist.gather(mine, outputs, **how), how)
        assert outputs is None or all(map(same, outputs, xs))
        x = np.zeros(shape, dtype)
        end(dist.scatter(x, xs if world.rank == 0 else None, **how), how)
        assert same(x, mine)
        outputs = [np.zeros_like(x) for x in xs]
        end(dist.all_to_all(outputs, [mine] * world.size, **how), how)
        assert all(map(same, outputs, xs))


def test_block_that_does_not_fit(world):
    if world.size == 1:
        return
    for size in (5, 15, 10):  # 5: as long as a piece of what is sent
        x, given = np.zeros(size), [np.full(30, rank + 1.0) for rank in range(world.size)]
        if world.rank == 0:
            dist.scatter(np.zeros(30), given)
        else:
            with pytest.raises(dist.MismatchError, match=f"sends 240 bytes .* expects {8 * size} from it"):
                dist.scatter(x)
        x = np.zeros(30)
        dist.scatter(x, given if world.rank == 0 else None)
        assert (x == world.rank + 1).all()


def test_messages(world):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for size in (4, 5, 10, 11, 12_345):
        x = np.zeros(size + 1)
        receive, sent = dist.irecv(x, left), dist.isend(np.arange(size) + 1.0, right)
        receive.wait()
        sent.wait()
        assert receive.count() == size
        assert same(x[:-1], np.arange(size) + 1.0)
        sent = dist.isend(np.arange(size + 2) + 1.0, right)
        with pytest.raises(dist.ArrayError, match=f"{size + 2} elements"):
            dist.recv(x, left)
        sent.wait()


def test_objects(world):
    given = [{"rank": rank, "long": "x" * 1000 * rank} for rank in range(world.size)]
    found = [None] * world.size
    dist.all_gather_object(found, given[world.rank])
    assert found == given
    found = [None] * world.size if world.rank == 0 else None
    dist.gather_object(given[world.rank], found)
    assert found == (given if world.rank == 0 else None)
    dist.scatter_object_list(one := [None], given if world.rank == 0 else None)
    assert one == [given[world.rank]]
    found = given if world.rank == 0 else [None] * world.size
    dist.broadcast_object_list(found, 0)
    assert found == given


def test_datatypes_are_not_kept_for_ever(world):
    """Messages of more lengths than are kept, on their way at once."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    lengths = range(6, 6 + 2 * message._MOST_LONGS)
    outputs = [np.zeros(length) for length in lengths]
    works = [dist.irecv(output, left) for output in outputs]
    works += [dist.isend(np.full(length, float(length)), right) for length in lengths]
    for each in works:
        each.wait()
    assert all((output == output.size).all() for output in outputs)
    assert len(message._longs) == message._MOST_LONGS
