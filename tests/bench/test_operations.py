"""The reference finds all that is wrong, and nothing else."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest

from mpiddp.bench import operations
from mpiddp.bench.cli import DTYPES, OPERATIONS, REDUCTIONS
from mpiddp.bench.operations import Buffers

PYTHON = {"sum": operator.add, "min": min, "max": max}


@pytest.mark.parametrize("op", PYTHON)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "uint8"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_reduction_is_that_of_plain_python(dtype, op, size):
    kind = np.dtype(dtype)
    rows = [operations.pattern(rank, kind).tolist() for rank in range(size)]
    want = [functools.reduce(PYTHON[op], column) for column in zip(*rows, strict=True)]
    np.testing.assert_array_equal(operations.reduced(size, kind, op), want)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("count", [1, operations.PERIOD, 65_344, 65_345, 200_003])
def test_every_wrong_element_is_counted(dtype, count):
    kind = np.dtype(dtype)
    values = operations.pattern(1, kind)
    x = np.empty(count, kind)
    operations.repeat(x, values)
    assert operations.count_mismatches(x, values) == 0
    places = sorted({0, count - 1, count // 2})
    for place in places:
        x[place] += kind.type(1)
    assert operations.count_mismatches(x, values) == len(places)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_wrong(bad):
    values = operations.pattern(0, np.dtype("float32"))
    x = np.empty(100, np.float32)
    operations.repeat(x, values)
    x[42] = bad
    assert operations.count_mismatches(x, values) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_rounded_average_is_right_and_a_missing_rank_is_not(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    kind = np.dtype(dtype)
    wide = np.promote_types(kind, np.float32) if dtype != "bfloat16" else np.dtype("float32")
    rows = [operations.pattern(rank, kind).astype(wide) for rank in range(3)]
    want = operations.reduced(3, kind, "avg")
    assert operations.count_mismatches((sum(rows) / wide.type(3)).astype(kind), want) == 0
    differs = int(np.count_nonzero(rows[2]))
    assert operations.count_mismatches((sum(rows[:2]) / wide.type(3)).astype(kind), want) == differs > 0


def test_patterns_of_ranks_differ():
    patterns = [operations.pattern(rank, np.dtype("float32")) for rank in range(8)]
    for index, one in enumerate(patterns):
        for other in patterns[:index]:
            assert np.count_nonzero(one != other) > operations.PERIOD / 2


def test_partial_sums_on_other_ranks_are_wrong_unless_they_are_expected():
    ranks = [Buffers("reduce", rank, 2, 4000, np.dtype("float32")) for rank in range(2)]
    for each in ranks:
        each.fill()
    ranks[0].x += ranks[1].x
    ranks[1].x[...] = ranks[0].x
    assert ranks[1].count_wrong() > 0
    assert [each.count_wrong(spoils_inputs=True) for each in ranks] == [0, 0]
    ranks[0].x[3] += 1
    assert ranks[0].count_wrong(spoils_inputs=True) == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_total_size_is_that_of_the_largest_array(operation):
    for size_bytes in (1, 100, 1000, 4096):
        found = Buffers(operation, 0, 3, size_bytes, np.dtype("float64"))
        assert max(found.x.nbytes, found.output.nbytes) == found.total_bytes
        if operation != "barrier":
            assert found.total_bytes <= max(size_bytes, 3 * 8)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_arrays_at_rest_stay_as_they_are(op):
    found = Buffers("all_reduce", 0, 2, 400, np.dtype("float32"), op)
    found.reset()
    before = found.x.copy()
    for _ in range(200):
        found.x[...] = operations._NUMPY[op](np.stack([found.x, found.x]), axis=0)
    np.testing.assert_array_equal(found.x, before)
