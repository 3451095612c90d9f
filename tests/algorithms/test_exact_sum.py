import math
from fractions import Fraction

import numpy as np
import pytest
from harness.pretend import pretended_nodes

import mpiddp as dist
from mpiddp import ReduceOp
from mpiddp.algorithms import exact_sum

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3)]

EXACT = ReduceOp.EXACT_SUM


def addends(ranks: int, count: int, dtype: type, binades: int) -> np.ndarray:
    """Return the arrays of all ranks: magnitudes over ``binades``, zeros, cancelling ones, subnormals."""
    rng = np.random.default_rng((ranks, count, binades))
    x = rng.standard_normal((ranks, count)) * 2.0 ** rng.integers(-binades // 2, binades // 2 + 1, (ranks, count))
    x[rng.random(x.shape) < 0.1] = 0
    x[rng.random(x.shape) < 0.05] = -0.0
    x = x.astype(dtype)
    x[rng.random(x.shape) < 0.1] *= np.finfo(dtype).smallest_subnormal
    x[-1, ::3] = -x[0, ::3]
    return x


def rounded(exact: Fraction, dtype: type) -> float:
    """Return the number nearest to a fraction, ties to even."""
    if dtype == np.float64:
        return exact.numerator / exact.denominator  # of integers Python rounds once
    limits = np.finfo(dtype)
    magnitude = abs(exact)
    exponent = -149
    while magnitude >= Fraction(2) ** (exponent + limits.nmant + 1):
        exponent += 1
    number = math.ldexp(round(magnitude / Fraction(2) ** exponent), exponent)
    return math.copysign(number if number <= float(limits.max) else math.inf, exact)


def fractions(x: np.ndarray, dtype: type) -> list[float]:
    return [rounded(sum(map(Fraction, map(float, column)), Fraction()), dtype) for column in x.T]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_is_that_of_fractions_rounded_once(world, dtype):
    for binades in (0, 20, 60, 240):
        x = addends(world.size, 150, dtype, binades)
        mine = x[world.rank].copy()
        dist.all_reduce(mine, EXACT)
        expected = fractions(x, dtype)
        assert mine.tolist() == expected, binades
        if dtype == np.float64:
            assert expected == [math.fsum(column) for column in x.T]
        assert not np.signbit(mine[mine == 0]).any()


def test_range_of_float64(world):
    x = np.ldexp(np.linspace(-1, 1, 41), np.linspace(-1074, 1020, 41).astype(int))
    x = np.stack([np.roll(x, 3 * rank) * (-1) ** rank for rank in range(world.size)])
    mine = x[world.rank].copy()
    dist.all_reduce(mine, EXACT)
    assert mine.tolist() == [math.fsum(column) for column in x.T]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(world, dtype):
    limit, two = np.finfo(dtype), world.size > 1
    least = limit.smallest_subnormal
    rows = [  # of two ranks, and their sum
        (limit.max, limit.max, np.inf),
        (np.inf, -1.0, np.inf),
        (-np.inf, limit.max, -np.inf),
        (np.inf, -np.inf, np.nan),
        (np.nan, 1.0, np.nan),
        (-0.0, -0.0, 0.0),
        (least, least, 2 * least),
        (1.0, limit.eps / 2, 1.0),
    ]
    x = np.array(rows, dtype)[:, world.rank].copy() if world.rank < 2 else np.zeros(len(rows), dtype)
    dist.all_reduce(x, EXACT)
    np.testing.assert_array_equal(x, np.array(rows, dtype)[:, 2 if two else 0])
    assert not np.signbit(x[5])


@pytest.mark.parametrize("places", [(55,), (60, 90, 125)], ids=["floats", "integers"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ties_are_decided_by_the_last_digit(world, dtype, places):
    """Sums between two numbers, more or less by parts of an addend that are so many binary places below."""
    eps = np.finfo(dtype).eps
    rows = [(1, eps / 2), (1 + eps, eps / 2), (-1 - eps, -eps / 2), (3, eps), (1, -eps / 4)]
    rows += [(2.0**24 - 1, 0.5)] * (len(places) > 1)  # two parts have no room for it
    least = [0, *(sign * 2.0**-place for place in places for sign in (1, -1))]
    x = np.zeros((world.size, len(rows), len(least)))
    x[0] += np.array(rows)[:, :1]
    x[-1] += np.array(rows)[:, 1:]
    x[world.size // 2] = np.where(x[world.size // 2] == 0, least, x[world.size // 2])
    x = x.astype(dtype).reshape(world.size, -1)
    mine = x[world.rank].copy()
    dist.all_reduce(mine, EXACT)
    assert mine.tolist() == fractions(x, dtype)


@pytest.mark.parametrize("algorithm", [None, "native", "ring"])
@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 0, 1, 0)])
def test_bits_do_not_depend_on_pieces_or_on_who_has_which_addend(world, monkeypatch, algorithm, nodes):
    x = addends(world.size, 101, np.float32, 60)
    expected = fractions(x, np.float32)
    with pretended_nodes(nodes[: world.size]):
        for turn, piece in enumerate((1 << 24, 1 << 9)):
            monkeypatch.setattr(exact_sum, "_PIECE_BYTES", piece)
            mine = dist.symmetric_empty(101, np.float32) if turn else np.empty(101, np.float32)
            mine[...] = x[(world.rank + turn) % world.size]
            work = dist.all_reduce(mine, EXACT, async_op=True, algorithm=algorithm)
            work.wait()
            assert mine.tolist() == expected


def test_what_it_does_not_take_is_said(world):
    with pytest.raises(TypeError, match="takes float32 and float64, got float16; convert"):
        dist.all_reduce(np.ones(2, np.float16), EXACT)
    with pytest.raises(TypeError, match=r"got int64; .* of integers is exact"):
        dist.all_reduce(np.ones(2, np.int64), EXACT)
    with pytest.raises(TypeError, match="is for all_reduce, not for reduce_scatter"):
        dist.reduce_scatter_single(np.ones(1), np.ones(world.size), EXACT)


def test_parts_that_cancel_lose_no_digit(world):
    """Of four ranks, whose larger parts sum to 0."""
    u = 2.0**-29
    x = np.array([[1.5 * u, 2.0**19.5], [-0.5 * u, 0], [-u, 0], [1.147 * 2.0**-78, 0]], np.float32)
    extents = [exact_sum._extent(row) for row in x]
    highest, lowest = max(each[0] for each in extents), min(each[1] for each in extents)
    parts, kind, cut, joined = exact_sum._way(np, x.dtype, highest, lowest, len(x))
    rows = np.zeros((parts, 2), kind)
    for each in x:
        one = np.empty_like(rows)
        cut(each, one)
        rows += one
    found = np.empty(2, np.float32)
    joined(rows, found)
    assert found.tolist() == fractions(x, np.float32)
