"""Wrong arguments: a clear error on the rank that gave them, the job alive, the next collective right."""

import math
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
from harness.inputs import Op, calls as every_call

import mpiddp as dist
from mpiddp.errors import ArrayError

pytestmark = pytest.mark.mpi


def good(shape=(4,)):
    return np.ones(shape, np.float32)


def read_only():
    x = good()
    x.flags.writeable = False
    return x


# The fault of an array, and its error; None if only writing to it is one.
WRONG_ARRAYS = {
    "None": (lambda: None, TypeError, "NumPy or CuPy array"),
    "list": (lambda: [1.0, 2.0], TypeError, "numpy.array"),
    "number": (lambda: 3.0, TypeError, "numpy.array"),
    "NumPy scalar": (lambda: np.float32(3), TypeError, "NumPy or CuPy array"),
    "text": (lambda: "array", TypeError, "NumPy or CuPy array"),
    "objects": (lambda: np.array([None, 1]), TypeError, "object collectives"),
    "masked": (lambda: np.ma.ones(4), TypeError, "mask"),
    "not contiguous": (lambda: good((8,))[::2], ArrayError, "ascontiguousarray"),
    "transposed": (lambda: good((2, 3)).T, ArrayError, "strides"),
    "not aligned": (lambda: np.zeros(17, np.uint8)[1:].view(np.float32), ArrayError, r"aligned .* x\.copy\(\)"),
    "byte-swapped": (lambda: good().astype(">f4"), ArrayError, "native byte order"),
    "read-only": (read_only, ArrayError, r"x\.copy\(\)"),
}


def wrong_calls_of_arrays(world, make):
    """Yield operations and the place of an argument, each with a call that has a wrong array there."""
    right = (world.rank + 1) % world.size
    for name, call in every_call(None, world.size, world.rank, right).items():
        for place, argument in enumerate(call.args):
            in_list = isinstance(argument, list) and isinstance(argument[0], np.ndarray)
            if in_list or (isinstance(argument, np.ndarray) and (name != "send" or world.size > 1)):
                given = [*call.args]
                given[place] = [make(), *argument[1:]] if in_list else make()
                yield name, place, partial(call.func, *given)


def goes_on(world):
    x = np.full(3, world.rank + 1.0)
    dist.all_reduce(x)
    assert (x == world.size * (world.size + 1) / 2).all()


@pytest.mark.parametrize("wrong", WRONG_ARRAYS)
def test_wrong_arrays(world, wrong):
    make, error, text = WRONG_ARRAYS[wrong]
    for name, place, call in wrong_calls_of_arrays(world, make):
        # Outputs come first, but in gather; the root of a broadcast, and a sender, only read.
        writes = place == (name == "gather") and name not in ("broadcast", "send", "isend")
        if wrong == "read-only" and not writes:
            continue
        with pytest.raises(error, match=text) as caught:
            call()
        assert name in str(caught.value), "the error does not name the operation"
        if "contiguous" in wrong and writes:
            assert "copy the result back: x[...] = y" in str(caught.value)
    goes_on(world)


def wrong_calls():
    size, rank = dist.get_world_size(), dist.get_rank()
    x, many = good(), [good() for _ in range(size)]
    huge = dist.group.WORLD._mailbox.max_tag + 1
    tags = [
        (partial(call, x, rank, tag=tag), ValueError, "tag from 0 to")
        for tag in (-1, huge, 2**70, "0", None, 1.0)
        for call in (dist.isend, dist.irecv, dist.recv)
    ]
    lists = [
        (lambda: dist.all_gather(tuple(many), x), TypeError, "list of arrays, got tuple"),
        (lambda: dist.all_gather(x, x), TypeError, "list of arrays"),
        (lambda: dist.all_gather([*many, x], x), ValueError, f"each of the {size} ranks"),
        (lambda: dist.gather(x, [*many, x], rank), ValueError, f"each of the {size} ranks"),
        (lambda: dist.gather(x, None, rank), ValueError, "``gather_list`` must be specified on destination rank"),
        (lambda: dist.scatter(x, [*many, x], rank), ValueError, f"each of the {size} ranks"),
        (lambda: dist.scatter(x, None, rank), ValueError, "``scatter_list`` must be specified on source rank"),
        (lambda: dist.reduce_scatter(x, [*many, x]), ValueError, f"each of the {size} ranks"),
        (lambda: dist.all_to_all([*many, x], many), ValueError, f"each of the {size} ranks"),
        (lambda: dist.all_to_all(many, [*many, x]), ValueError, f"each of the {size} ranks"),
    ]
    if size > 1:
        other = (rank + 1) % size
        lists += [
            (lambda: dist.gather(x, many, other), ValueError, "must NOT be specified on non-destination ranks"),
            (lambda: dist.scatter(x, many, other), ValueError, "must NOT be specified on non-source ranks"),
        ]
    double = x.astype(float)
    doubles, longs = [[make() for _ in range(size)] for make in (double.copy, lambda: good((5,)))]
    shapes = [
        (lambda: dist.all_gather(doubles, x), ArrayError, "needs float32 .* got float64"),
        (lambda: dist.all_gather(longs, x), ArrayError, r"needs shape \(4,\) .* got \(5,\)"),
        (lambda: dist.all_gather_single(good((4 * size + 1,)), x), ArrayError, "concatenated"),
        (lambda: dist.all_gather_into_tensor(good((4 * size + 1,)), x), ArrayError, "into_tensor.* needs shape"),
        (lambda: dist.all_gather_single(double, x), ArrayError, "needs float32"),
        (lambda: dist.gather(x, doubles, rank), ArrayError, "needs float32"),
        (lambda: dist.scatter(x, longs, rank), ArrayError, "needs shape"),
        (lambda: dist.reduce_scatter(x, longs), ArrayError, "needs shape"),
        (lambda: dist.reduce_scatter_single(x, good((4 * size + 1,))), ArrayError, "concatenated"),
        (lambda: dist.reduce_scatter_tensor(x, good((4 * size + 1,))), ArrayError, "scatter_tensor.* needs shape"),
        (lambda: dist.all_to_all(longs, many), ArrayError, "needs shape"),
        (lambda: dist.all_to_all_single(x, double), ArrayError, "needs float64"),
        (lambda: dist.all_to_all_single(x, x, [4] * size, [1]), ValueError, "_split_sizes that add up"),
        (lambda: dist.all_to_all_single(x, x, None, [-1] * size), ValueError, "_split_sizes that add up|divisible"),
    ]
    if size > 1:  # views that overlap, too
        memory = good((4 * size + 8,))
        views = [memory[4 * (size - each) : 4 * (size - each) + 8] for each in range(size)]
        shapes += [
            (lambda: dist.all_gather([x] * size, x), ArrayError, "all_gather needs outputs .* arrays 0 and 1"),
            (lambda: dist.gather(x, [x] * size, rank), ArrayError, "gather needs outputs with memory of their own"),
            (lambda: dist.all_to_all([x] * size, many), ArrayError, "all_to_all needs outputs with memory"),
            (lambda: dist.all_gather(views, good((8,))), ArrayError, r"arrays \d and \d of the list"),
        ]
    never = (math.nan, math.inf, -1, timedelta(seconds=-1))
    limits = (
        lambda timeout: dist.new_group(timeout=timeout),
        lambda timeout: dist.new_group(timeout=timeout, use_local_synchronization=True),
        lambda timeout: dist.new_subgroups(1, timeout=timeout),
        lambda timeout: dist.new_subgroups_by_enumeration([[rank]], timeout=timeout),
        lambda timeout: dist.split_group(split_ranks=[[rank]], timeout=timeout),
        lambda timeout: dist.barrier(timeout=timeout),
        lambda timeout: dist.monitored_barrier(timeout=timeout),
        lambda timeout: dist.all_reduce(good(), async_op=True).wait(timeout),
    )
    operations = [
        (lambda: dist.all_reduce(x, "sum"), TypeError, "ReduceOp"),
        (lambda: dist.all_reduce(x, 0), TypeError, r"must be an mpiddp\.ReduceOp such as mpiddp\.ReduceOp\.SUM"),
        (lambda: dist.all_reduce(x, Op.PREMUL_SUM), TypeError, "factor"),
        (lambda: dist.reduce(x, 0, "sum"), TypeError, "ReduceOp"),
        (lambda: dist.all_reduce(x.view("S4"), Op.SUM), TypeError, "object collectives"),
        (lambda: Op.SUM(2.0), RuntimeError, "PREMUL_SUM"),
        (lambda: Op.PREMUL_SUM(2.0)(3.0), RuntimeError, "PREMUL_SUM"),
        (lambda: Op.PREMUL_SUM(1j), TypeError, "real number"),
        (lambda: dist.all_reduce(x, group="x"), TypeError, "group"),
        *((lambda how=how, bad=bad: how(bad), TypeError, "timeout") for how in limits for bad in ("1", [1], True)),
        *((lambda how=how, bad=bad: how(bad), ValueError, "timeout.* finite") for how in limits for bad in never),
        *((lambda how=how: how(0), ValueError, "timeout.* above 0, got 0") for how in limits[:5]),
        (lambda: dist.P2POp(dist.isend, None, rank) and dist.isend(None, rank), TypeError, "array"),
    ]
    return tags + lists + shapes + operations


def test_wrong_calls(world):
    for number, (call, error, text) in enumerate(wrong_calls()):
        with pytest.raises(error, match=text):
            pytest.fail(f"call {number} returned {call()!r}, but should raise: {text}")
    goes_on(world)


def test_one_rank_alone_is_wrong(world):
    """The error is raised before anything is sent, so the others are not disturbed."""
    for bad in (None, good((8,))[::2], [1.0]):
        if world.rank == 0:
            with pytest.raises((TypeError, ArrayError)):
                dist.all_reduce(bad)
        goes_on(world)


def test_destroyed_groups_are_refused_everywhere(world):
    group = dist.new_group()
    dist.destroy_process_group(group)
    for call in (
        *every_call(group).values(),
        lambda: dist.new_subgroups(1, group),
        lambda: dist.split_group(group, [[0]]),
        lambda: dist.get_backend(group),
        lambda: dist.get_rank(group),
        lambda: dist.get_group_rank(group, 0),
        lambda: dist.P2POp(dist.isend, good(), 0, group) and dist.isend(good(), 0, group),
        lambda: dist.destroy_process_group(group),
    ):
        with pytest.raises(ValueError, match="destroyed"):
            call()
    for wrong in ("WORLD", 3, [0]):
        with pytest.raises(TypeError, match="group"):
            dist.destroy_process_group(wrong)
    dist.destroy_process_group(dist.GroupMember.NON_GROUP_MEMBER)
    goes_on(world)


def test_subclasses_of_arrays_are_arrays(world):
    """A matrix stays two-dimensional whatever one does to it, which an algorithm does not expect."""
    for length in (3, 300_000):
        x = np.ones((1, length), np.float32).view(np.matrix)
        dist.all_reduce(x)
        assert (np.asarray(x) == world.size).all()
