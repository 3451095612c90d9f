"""The reference finds all that is wrong, and nothing else."""

import numpy as np
import pytest

from mpiddp.bench import operations
from mpiddp.bench.cli import DTYPES
from mpiddp.bench.job import dtype as dtype_of
from mpiddp.bench.operations import Buffers


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("count", [1, operations.PERIOD, 65_344, 65_345, 200_003])
def test_every_wrong_element_is_counted(dtype, count):
    kind = np.dtype(dtype)
    values = operations.pattern(1, kind)
    x = np.empty(count, kind)
    x[...] = np.resize(values, count)
    assert operations.count_mismatches(x, values) == 0
    places = sorted({0, count - 1, count // 2, count // 3})
    for place, more in zip(places, (1, np.nan, np.inf, -np.inf) if kind.kind == "f" else (1,) * 4, strict=False):
        x[place] += kind.type(more)
    assert operations.count_mismatches(x, values) == len(places)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_rounded_average_is_right_and_a_missing_rank_is_not(dtype):
    kind = dtype_of(dtype)
    wide = np.promote_types(kind, np.float32) if dtype != "bfloat16" else np.dtype("float32")
    rows = [operations.pattern(rank, kind).astype(wide) for rank in range(3)]
    want = operations.reduced(3, kind, "avg")
    assert operations.count_mismatches((sum(rows) / wide.type(3)).astype(kind), want) == 0
    differs = int(np.count_nonzero(rows[2]))
    assert operations.count_mismatches((sum(rows[:2]) / wide.type(3)).astype(kind), want) == differs > 0


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
