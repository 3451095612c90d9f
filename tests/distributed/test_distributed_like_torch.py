"""The same program on torch (Gloo) and on mpiddp, in the same processes: values, returned things, classes of errors.

Meant differences have no case here but a line in the README's table.
"""

import importlib
import inspect
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from harness.collectives import COLLECTIVES, check
from harness.inputs import Op, both_ways, means_something, total
from harness.learning import gloo

import mpiddp

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


@pytest.fixture
def torch():
    return gloo(least=1)


def libraries(torch):
    """Yield both libraries under the same names: ``dist``, ``make`` (array from nested lists), ``zeros``."""
    yield SimpleNamespace(
        dist=torch.distributed,
        make=lambda value, dtype="float32": torch.tensor(value, dtype=getattr(torch, dtype)),
        zeros=lambda shape, dtype="float32": torch.zeros(shape, dtype=getattr(torch, dtype)),
    )
    yield SimpleNamespace(
        dist=mpiddp,
        make=lambda value, dtype="float32": np.array(value, dtype),
        zeros=lambda shape, dtype="float32": np.zeros(shape, dtype),
    )


def plain(value):
    """Return what a program sees of ``value``, without the library that it comes from."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str, dict)):
        return value
    if hasattr(value, "tolist"):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), value.tolist()]
    # torch's own classes have names such as _SendWork, AsyncBroadcastWork and BackendConfig
    bases = " ".join(base.__name__ for base in type(value).__mro__)
    return next((name for name in ("Work", "Future", "ProcessGroup") if name in bases), type(value))


def outcome(case, library, world):
    try:
        return plain(case(library, world.rank, world.size)), None
    except Exception as error:
        return None, error


def blocks(t, *numbers):
    return [t.make([number, 1.0]) for number in numbers]


CASES = {
    "all_reduce wraps": lambda t, rank, size: (t.dist.all_reduce(x := t.make([200, 5], "uint8")), x),
    "all_reduce avg": lambda t, rank, size: (t.dist.all_reduce(x := t.make([rank * 2.0]), op=t.dist.ReduceOp.AVG), x),
    "all_reduce_coalesced": lambda t, rank, size: (t.dist.all_reduce_coalesced(xs := blocks(t, rank, 2.0)), xs),
    "barriers": lambda t, rank, size: (t.dist.barrier(), t.dist.monitored_barrier()),
    "queries": lambda t, rank, size: (
        [t.dist.is_initialized(), t.dist.is_available(), t.dist.get_rank(), t.dist.get_world_size()],
        t.dist.group.WORLD.size(),
    ),
}


def case(function):
    CASES[function.__name__] = function
    return function


@case
def asynchronous(t, rank, size):
    x = t.make([1.0, rank])
    work = t.dist.all_reduce(x, async_op=True)
    waited = work.wait()
    return work, waited, work.is_completed(), work.exception(), x


@case
def objects(t, rank, size):
    everyone, gathered, scattered = [None] * size, [None] * size if rank == 0 else None, [None, 7]
    sent = [{"from": rank}, None, 1.5]
    returned = [
        t.dist.all_gather_object(everyone, {"rank": rank}),
        t.dist.gather_object([rank], gathered),
        t.dist.broadcast_object_list(sent, size - 1),
        t.dist.scatter_object_list(scattered, [f"to {each}" for each in range(size)] if rank == 0 else None),
    ]
    return returned, everyone, gathered, sent, scattered


@case
def point_to_point(t, rank, size):
    if size == 1:
        return None
    x = t.zeros((3,))
    if rank == 0:
        return t.dist.send(t.make([1.0, 2.0]), size - 1), t.dist.send_object_list([1, "a"], size - 1)
    if rank == size - 1:
        found = [None, None]
        return t.dist.recv(x), x, t.dist.recv_object_list(found, 0), found  # a shorter message fills the beginning
    return None


@case
def groups(t, rank, size):
    ranks = list(reversed(range(size)))
    kept = t.dist.new_group(ranks, sort_ranks=False)
    ordered = t.dist.new_group(ranks)
    one = t.dist.new_group([size - 1])
    found = [
        t.dist.get_process_group_ranks(kept),
        t.dist.get_process_group_ranks(ordered),
        t.dist.get_rank(kept),
        t.dist.get_rank(one),
        t.dist.get_world_size(one),
        t.dist.get_group_rank(kept, 0),
        t.dist.get_global_rank(kept, 0),
        one == t.dist.GroupMember.NON_GROUP_MEMBER,
    ]
    x = t.make([float(rank)])
    t.dist.broadcast(x, group=kept, group_src=0)
    mine, everyone = t.dist.new_subgroups_by_enumeration([[0], *([[1]] if size > 1 else [])])
    found += [x, mine is None, [each == -100 for each in everyone]]
    for group in (kept, ordered, *(each for each in (one, mine) if each not in (None, -100))):
        found.append(t.dist.destroy_process_group(group))
    return found


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_write_and_return_what_ours_do(world, torch, name):
    """As NumPy does it, which ours are compared with, too."""
    theirs = {"make": torch.from_numpy, "read": torch.Tensor.numpy, "library": torch.distributed}
    kinds, ops, shapes = ["int64", "float32"], [Op.SUM], [(2,)]
    if name == "all_reduce":
        kinds = ["bool", "uint8", "int32", "float32"]
        ops = [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR]
        shapes = [(3,), ()]
    for kind, op, shape, how in itertools.product(kinds, ops, shapes, both_ways()):
        if means_something(op, np.dtype(kind)):
            check(world, name, np.dtype(kind), shape, how, op=op, **theirs)
    if name == "all_to_all_single":
        check(world, name, np.dtype("float32"), lambda sender, receiver: (receiver + 1,), **theirs)
    mpiddp.barrier()


@pytest.mark.parametrize("name", CASES)
def test_same_result(world, torch, name):
    theirs, ours = (outcome(CASES[name], library, world) for library in libraries(torch))
    assert theirs[1] is None, f"torch cannot do it: {theirs[1]!r}"
    assert ours[1] is None, f"mpiddp raised {ours[1]!r}"
    assert ours[0] == theirs[0]
    mpiddp.barrier()


def wrong(t, rank, size):
    """Return calls that are wrong on every rank before anything is sent."""
    d, x = t.dist, t.make([1.0, 2.0])
    many = [t.zeros((2,)) for _ in range(size)]
    other = (rank + 1) % size
    return {
        "init twice": lambda: d.init_process_group(),
        "a list": lambda: d.all_reduce([1.0]),
        "None": lambda: d.broadcast(None, 0),
        "a tuple of outputs": lambda: d.all_gather(tuple(many), x),
        "another dtype": lambda: d.all_gather([t.zeros((2,), "float64")] * size, x),
        "another shape": lambda: d.all_gather([t.zeros((3,))] * size, x),
        "too many outputs": lambda: d.all_gather([*many, x], x),
        "no gather_list": lambda: d.gather(x, None, rank),
        "no scatter_list": lambda: d.scatter(x, None, rank),
        "gather_list elsewhere": lambda: d.gather(x, many, other) if size > 1 else d.gather(x, None, 0),
        "scatter_list elsewhere": lambda: d.scatter(x, many, other) if size > 1 else d.scatter(x, None, 0),
        "no src": lambda: d.broadcast(x),
        "two src": lambda: d.broadcast(x, 0, group_src=0),
        "no dst": lambda: d.send(x),
        "send to oneself": lambda: d.send(x, rank),
        "an unequal reduce_scatter_tensor": lambda: d.reduce_scatter_tensor(x, t.zeros((2 * size + 1,))),
        "P2POp of another function": lambda: d.P2POp(d.send, x, other),
        "P2POp without peer": lambda: d.P2POp(d.isend, x),
        "a batch of something else": lambda: d.batch_isend_irecv([1]),
        "ranks out of range": lambda: d.new_group([size]),
        "ranks twice": lambda: d.new_group([0, 0]),
        "a timeout of text": lambda: d.new_group(timeout="1"),
        "subgroups that do not divide": lambda: d.new_subgroups(size + 1),
        "overlapping subgroups": lambda: d.new_subgroups_by_enumeration([[0], [0]]),
        "no subgroups": lambda: d.new_subgroups_by_enumeration([]),
        "a short object list": lambda: d.all_gather_object([], 1),
        "an empty output list": lambda: d.scatter_object_list([], [1] * size),
    }


def test_same_class_of_error(world, torch):
    theirs, ours = (wrong(library, world.rank, world.size) for library in libraries(torch))
    for name in theirs:
        with pytest.raises(Exception) as mine:
            ours[name]()
        with pytest.raises(Exception) as other:
            theirs[name]()
        assert isinstance(mine.value, type(other.value)), f"{name}: {mine.value!r}, torch: {other.value!r}"
    assert total(None, 1) == world.size


def test_signatures(torch):
    """Argument names, order and defaults are torch's; additional ones come last."""
    exceptions = {"ReduceOp", "Work", "ProcessGroup", "Future", "GroupMember", "P2POp", "group"}
    for name in sorted(set(mpiddp.distributed.__all__) - exceptions):
        theirs, ours = getattr(torch.distributed, name, None), getattr(mpiddp, name)
        if theirs is None or not callable(theirs) or inspect.isclass(ours):
            continue
        expected = [each for each in inspect.signature(theirs).parameters if not each.startswith("_")]
        found = list(inspect.signature(ours).parameters)
        assert found[: len(expected)] == expected, name
        for each in expected:
            default = inspect.signature(theirs).parameters[each].default
            mine = inspect.signature(ours).parameters[each].default
            if not hasattr(default, "name") and each != "op":
                assert mine == default, f"{name}({each})"


@pytest.mark.ranks(1)
def test_options_of_ddp_stand_where_torch_has_them(torch):
    theirs = list(inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters)
    for ours in (mpiddp, importlib.import_module("mpiddp.torch")):
        found = inspect.signature(ours.DistributedDataParallel).parameters
        by_position = [name for name, each in found.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert by_position == theirs[: len(by_position)]
        assert set(found) <= {*theirs, "virtual_ranks"}
        assert found == inspect.signature(mpiddp.DistributedDataParallel).parameters, "the same options of both"
