"""Collectives with gradients: against central differences over all ranks, in groups, and on ranks that differ."""

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import Tensor, no_grad

pytestmark = pytest.mark.mpi

F = nn.functional
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM(0.3)]
SHAPES = [(), (3,), (2, 3), (0, 2)]


def gradcheck_over_ranks(fn, inputs, eps=1e-6):
    """Compare gradients with central differences of the sum, over ranks, of the outputs with random weights.

    ``fn`` takes this rank's inputs, float64 leaves, and returns its outputs. Each rank's inputs are moved in turn, in a
    random direction, while all ranks call ``fn``.
    """
    outputs = fn(*inputs)
    rng = np.random.default_rng(dist.get_rank())
    weights = [rng.uniform(0.5, 1.5, output.shape) for output in outputs]
    directions = [rng.standard_normal(x.shape) for x in inputs]
    sum((output * w).sum() for output, w in zip(outputs, weights, strict=True)).backward()
    assert all(x.grad.shape == x.shape for x in inputs)

    def moved(steps):
        for x, direction in zip(inputs, directions, strict=True):
            x.data += steps * eps * direction

    def total():
        with no_grad():
            found = np.array([sum(float((y.data * w).sum()) for y, w in zip(fn(*inputs), weights, strict=True))])
        dist.all_reduce(found)
        return found[0]

    for rank in range(dist.get_world_size()):
        mine = rank == dist.get_rank()
        moved(mine)
        above = total()
        moved(-2 * mine)
        below = total()
        moved(mine)
        if mine:
            found = sum((x.grad * direction).sum() for x, direction in zip(inputs, directions, strict=True))
            assert found == pytest.approx((above - below) / (2 * eps), rel=1e-5, abs=1e-7)


def leaves(world, *shapes, requires_grad=True):
    rng = np.random.default_rng(100 + world.rank)
    return [Tensor(rng.standard_normal(shape), requires_grad=requires_grad) for shape in shapes]


def square(x):
    """Something between leaf and collective, whose output has another layout."""
    return (x * x).T if x.ndim > 1 else x * x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reductions_and_copies(world, shape):
    for op in OPS:
        gradcheck_over_ranks(lambda x, op=op: [F.all_reduce(square(x), op)], leaves(world, shape))
    gradcheck_over_ranks(lambda x: F.all_gather(square(x)), leaves(world, shape))


def test_all_gather_of_which_parts_are_used(world):
    """In another group they are in its order."""
    gradcheck_over_ranks(lambda x: [F.all_gather(square(x))[(world.rank + 1) % world.size]], leaves(world, (2, 3)))

    def twice(x):
        parts = F.all_gather(x)
        return [parts[0] * parts[-1], parts[0].sum() * parts[0]]

    gradcheck_over_ranks(twice, leaves(world, (3,)))
    order = list(range(world.size))[::-1]
    group = dist.new_group(order, sort_ranks=False)
    gradcheck_over_ranks(lambda x: [y * (i + 1) for i, y in enumerate(F.all_gather(x, group))], leaves(world, (2,)))
    gathered = F.all_gather(np.array([world.rank]), group)
    assert [each.item() for each in gathered] == order
    dist.destroy_process_group(group)


def test_outside_of_the_group(world):
    group = dist.new_group([0])
    x = Tensor([1.0], requires_grad=True)
    for call in (F.all_reduce, F.all_gather):
        if world.rank == 0:
            found = call(x, group=group)
            found = found[0] if isinstance(found, tuple) else found
            assert found.tolist() == [1] and found.requires_grad
        else:
            with pytest.warns(UserWarning, match=f"Running {call.__name__} on global rank {world.rank}"):
                assert call(x, group=group) is None
    if world.rank == 0:
        dist.destroy_process_group(group)


def test_ranks_without_a_gradient_take_part(world):
    """The last rank's input requires none: its data count, and the others get their gradients."""
    last = world.rank == world.size - 1
    x = Tensor([1.0 + world.rank, 2.0], requires_grad=not last or world.size == 1)
    for call in (F.all_reduce, lambda x: F.all_gather(x)[world.size - 1]):
        x.grad = None
        y = call(x)
        assert y.requires_grad
        y.sum().backward()
        assert (x.grad is not None) == x.requires_grad


def test_nothing_is_recorded_where_nobody_needs_it(world):
    x = Tensor([1.0, 2.0], requires_grad=True)
    for y in (F.all_reduce(x.detach()), F.all_gather(x.data)[0], F.all_reduce(np.arange(3))):
        assert not y.requires_grad and y.grad_fn is None
    with no_grad():
        assert not F.all_reduce(x).requires_grad and not F.all_gather(x)[0].requires_grad
    assert F.all_reduce(x.detach(), dist.ReduceOp.MAX).tolist() == [1, 2]


@pytest.mark.mpi(min_size=2)
def test_one_rank_that_records_nothing_is_an_error_on_all(world):
    x = Tensor([1.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="does not record"):
        if world.rank == 1:
            with no_grad():
                F.all_reduce(x)
        else:
            F.all_reduce(x)


def test_wrong_arguments(world):
    x = Tensor([1.0], requires_grad=True)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        with pytest.raises(ValueError, match=f"has no gradient for ReduceOp.{op.name}"):
            F.all_reduce(x, op)
    with pytest.raises(TypeError, match="ReduceOp"):
        F.all_reduce(x, "sum")
    with pytest.raises(TypeError, match="NumPy or CuPy"):
        F.all_reduce([1.0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64], ids=lambda dtype: dtype.__name__)
def test_dtypes_are_kept(world, dtype):
    x = Tensor(np.ones(3, dtype), requires_grad=True)
    for y in (F.all_reduce(x, dist.ReduceOp.AVG), *F.all_gather(x)):
        assert y.dtype == dtype
        x.grad = None
        y.backward(np.ones(3), retain_graph=True)
        assert x.grad.dtype == dtype


def test_backward_twice(world):
    x = Tensor([1.0, 2.0], requires_grad=True)
    parts = F.all_gather(x)
    first, last = parts[0], parts[-1]
    first.sum().backward(retain_graph=True)
    (2 * last.sum()).backward(retain_graph=True)
    expected = world.size * ((world.rank == 0) + 2 * (world.rank == world.size - 1))
    assert x.grad.tolist() == [expected, expected]


def test_inputs_and_other_ranks_stay_as_they_are(world):
    x = Tensor([1.0, 2.0], requires_grad=True)
    for call in (F.all_reduce, lambda x: F.all_gather(x)[0]):
        y = call(x)
        y.data[...] = 9
        assert x.tolist() == [1, 2]
