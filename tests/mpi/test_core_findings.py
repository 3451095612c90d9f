"""Past defects of the communication core that need no launcher of their own; see also tests/launch."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import Tensor

pytestmark = [pytest.mark.mpi, pytest.mark.core]

HALF = ["float16"]
if importlib.util.find_spec("ml_dtypes"):
    import ml_dtypes  # noqa: F401 (NumPy knows the name then)

    HALF.append("bfloat16")


@pytest.mark.parametrize(
    "op", [dist.ReduceOp.AVG, pytest.param(dist.ReduceOp.PREMUL_SUM(0.5), id="PREMUL_SUM")], ids=lambda op: op.name
)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.mpi(min_size=2)
def test_infinity_of_a_complex_array_stays_one(world, op, dtype):
    x = np.array([np.inf + 0j, 1 + 1j], dtype)
    dist.all_reduce(x, op)
    factor = 1.0 if op is dist.ReduceOp.AVG else world.size / 2
    np.testing.assert_array_equal(x.real, np.array([np.inf, factor]))
    np.testing.assert_array_equal(x.imag, np.array([0, factor]))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.mpi(min_size=2)
def test_factor_of_half_types_gives_the_same_bits_in_arrays_of_any_length(world, dtype):
    # Each rank's own numbers, the same in a short array and all over a long one.
    row = np.random.default_rng(world.rank).standard_normal(64).astype(dtype)
    short, long = row.copy(), np.tile(row, 1 << 13)
    op = dist.ReduceOp.PREMUL_SUM(1 / 3)
    dist.all_reduce(short, op)
    dist.all_reduce(long, op)
    assert (long.reshape(-1, 64).view(np.uint16) == short.view(np.uint16)).all()


@pytest.mark.parametrize("count", [4, 100_000, 1_000_000])
def test_factor_of_zero_has_its_own_sign(world, count):
    for factor in (0.0, -0.0, 0.0):
        dist.all_reduce(x := np.ones(count), dist.ReduceOp.PREMUL_SUM(factor))
        assert (np.signbit(x) == np.signbit(factor)).all() and not x.any()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("made", ["by hand", "by an operation"])
def test_error_in_a_callback_does_not_lose_the_others(made, error):
    called = []

    def fail(future):
        called.append("first")
        raise error

    work = dist.all_reduce(np.ones(1 << 16), async_op=True) if made == "by an operation" else None
    future = dist.Future() if work is None else work.get_future()
    future.add_done_callback(fail)
    future.add_done_callback(lambda future: called.append("second"))
    try:
        if work is None:
            future.set_result(1)
        else:
            work.wait()
    except error:
        assert not issubclass(error, Exception), "an error of a callback is logged"
    future.wait()
    assert called == ["first", "second"]


class Branches(nn.Module):
    """Two layers, of which forward uses one."""

    def __init__(self):
        super().__init__()
        nn.manual_seed(5)
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def test_static_graph_is_learned_in_a_backward_that_is_complete():
    def fail(gradient):
        raise ZeroDivisionError

    ddp = dist.DistributedDataParallel(Branches(), static_graph=True)
    x = Tensor(np.ones((2, 4), np.float32), requires_grad=True)
    handle = x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        ddp(x).sum().backward()
    handle.remove()
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).sum().backward()
        assert ddp.module.unused.weight.grad is None
        assert ddp.module.used.weight.grad is not None
