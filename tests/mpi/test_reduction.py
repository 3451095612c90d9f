"""Reductions: their factors, half types, and numbers that are not finite."""

import pickle

import numpy as np
import pytest
from harness.inputs import Op, dtype_of

import mpiddp as dist
from mpiddp.algorithms.local_reduce import premultiply

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("op", [Op.AVG, pytest.param(Op.PREMUL_SUM(0.5), id="PREMUL_SUM")], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.mpi(min_size=2)
def test_infinity_of_a_complex_array_stays_one(world, op, dtype):
    x = np.array([np.inf + 0j, 1 + 1j], dtype)
    dist.all_reduce(x, op)
    factor = 1.0 if op is Op.AVG else world.size / 2
    np.testing.assert_array_equal(x.real, np.array([np.inf, factor]))
    np.testing.assert_array_equal(x.imag, np.array([0, factor]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.mpi(min_size=2)
def test_factor_of_half_types_gives_the_same_bits_in_arrays_of_any_length(world, dtype):
    # Each rank's own numbers, the same in a short array and all over a long one.
    row = np.random.default_rng(world.rank).standard_normal(64).astype(dtype_of(dtype))
    short, long = row.copy(), np.tile(row, 10_000)
    op = Op.PREMUL_SUM(1 / 3)
    dist.all_reduce(short, op)
    dist.all_reduce(long, op)
    assert (long.reshape(-1, 64).view(np.uint16) == short.view(np.uint16)).all()


@pytest.mark.parametrize("count", [4, 150_000, 1_000_000])
def test_factor_of_zero_has_its_own_sign(world, count):
    for factor in (0.0, -0.0, 0.0):
        dist.all_reduce(x := np.ones(count), Op.PREMUL_SUM(factor))
        assert (np.signbit(x) == np.signbit(factor)).all() and not x.any()


def test_factors_are_equal_when_their_values_are(world):
    assert Op.PREMUL_SUM(0.5) is Op.PREMUL_SUM(0.5)
    assert Op.PREMUL_SUM(0.5) is not Op.PREMUL_SUM(0.25)
    assert Op.PREMUL_SUM(0.0) is not Op.PREMUL_SUM(-0.0)
    assert pickle.loads(pickle.dumps(Op.PREMUL_SUM(0.5))) is Op.PREMUL_SUM(0.5)
    xs = [np.ones(3), np.ones(5)]
    dist.all_reduce_coalesced(xs, Op.PREMUL_SUM(0.5))
    assert all((x == world.size / 2).all() for x in xs)


def test_a_factor_of_one_is_no_pass_over_the_array() -> None:
    x = np.ones(3, np.float32)
    x.flags.writeable = False
    premultiply(Op.PREMUL_SUM(1.0), x)
    with pytest.raises(ValueError, match="read-only"):
        premultiply(Op.PREMUL_SUM(0.5), x)
