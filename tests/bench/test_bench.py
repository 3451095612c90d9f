"""The benchmarks on 1 to 4 ranks: participants do the operation, and wrong results are noticed."""

import argparse
import itertools
import json
import time

import numpy as np
import pytest

import mpiddp as dist
from mpiddp.algorithms import plan
from mpiddp.bench import compare, operations, results, sweep, tune
from mpiddp.bench.cli import OPERATIONS
from mpiddp.bench.job import Bench, job
from mpiddp.bench.operations import Buffers, Contender
from mpiddp.bench.timing import Way
from mpiddp.cli import build_parser
from mpiddp.mpi import lazy
from mpiddp.training.config import UsageError

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

SIZES = (1, 4 * 1021, 2_300_000)


@pytest.fixture
def here() -> Bench:
    with job() as made:
        yield made


def contender(name: str, here: Bench) -> Contender:
    return Contender(name, (lambda b: operations.mpi4py(b, here.comm)) if name == "mpi4py" else operations.mpiddp)


def wrong_after(here: Bench, who: Contender, buffers: Buffers) -> int:
    call = who.prepare(buffers)
    assert call is not None
    buffers.reset()
    call()
    buffers.fill()
    if here.size > 1 and buffers.count > 1000:
        assert here.comm.allreduce(buffers.count_wrong()) > 0, "doing nothing passes"
    call()
    return here.comm.allreduce(buffers.count_wrong())


@pytest.mark.parametrize("name", ["mpiddp", "symmetric", "mpi4py"])
def test_operations_are_right(here, name):
    allocate = dist.symmetric_empty if name == "symmetric" else np.empty
    for operation, size_bytes in itertools.product(OPERATIONS, SIZES):
        buffers = Buffers(operation, here.rank, here.size, size_bytes, np.dtype("float32"), "sum", allocate)
        assert wrong_after(here, contender(name, here), buffers) == 0, operation
        if here.rank == 0 and buffers.count:
            buffers.output[-1] += 1
            assert buffers.count_wrong() == 1


@pytest.mark.parametrize(("dtype", "op"), [("float16", "sum"), ("int8", "max"), ("float64", "avg")])
def test_reductions_are_right(here, dtype, op):
    for name, operation in itertools.product(["mpiddp", "mpi4py"], ["all_reduce", "reduce", "reduce_scatter"]):
        who = contender(name, here)
        buffers = Buffers(operation, here.rank, here.size, 50_000, np.dtype(dtype), op)
        if who.prepare(buffers) is None:
            assert (who.name, dtype) == ("mpi4py", "float16")
            continue
        assert wrong_after(here, who, buffers) == 0


@pytest.mark.parametrize(
    ("operation", "dtype", "deterministic", "named"),
    [
        ("broadcast", "float16", "0", "native"),
        ("all_reduce", "float16", "0", "exchange"),
        ("all_reduce", "float32", "0", "native"),
        ("all_reduce", "float32", "1", "exchange"),
    ],
)
def test_algorithm_in_the_place_of_mpis_own_is_named(here, choose, operation, dtype, deterministic, named):
    choose(DETERMINISTIC=deterministic)
    buffers = Buffers(operation, here.rank, here.size, 1024, np.dtype(dtype))
    assert operations.algorithm_of(buffers, "native") == named


def options(*given: str) -> argparse.Namespace:
    found = build_parser().parse_args(["bench", *given])
    found.sizes = [found.begin, found.end] if hasattr(found, "begin") else []
    return found


@pytest.mark.mpi(min_size=2)
def test_table_has_the_columns_of_nccl_tests(here, capsys):
    given = ("all_reduce", "-b", "64", "-e", "2K", "-n", "2", "--dtype", "float64", "--symmetric")
    assert sweep.run(options(*given, "--algorithm", "two_shot")) == 0
    lines = capsys.readouterr().out.splitlines()
    if here.rank:
        assert not lines
        return
    assert lines[0].startswith(f"# {here.size} ranks on 1 node")
    assert "# arrays are written anew before each call; times of the slowest rank" in lines
    head = next(line for line in lines if "busbw" in line)
    columns = ["size", "count", "type", "redop", "root", "time", "min", "max", "algbw", "busbw", "#wrong", "algorithm"]
    assert head.split() == ["#", *columns]
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:5] for row in rows] == [["64", "8", "float64", "sum", "-1"], ["2048", "256", "float64", "sum", "-1"]]
    assert all(row[10:] == ["0", "two_shot"] for row in rows)
    assert "# Avg bus bandwidth" in lines[-1]


def test_one_wrong_element_on_one_rank_fails_the_benchmark(here, monkeypatch, capsys):
    prepare = operations.mpiddp

    def prepare_badly(buffers, algorithm=None):
        call = prepare(buffers)

        def bad():
            call()
            buffers.output[1:2] += here.rank == here.size - 1

        return bad

    arguments = options("all_reduce", "-b", "4", "-e", "4K", "-n", "2", "-w", "1")
    assert sweep.run(arguments) == 0
    capsys.readouterr()
    monkeypatch.setattr(operations, "mpiddp", prepare_badly)
    assert sweep.run(arguments) == 1
    out = capsys.readouterr().out
    if here.rank == 0:
        rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
        assert [row[10] for row in rows] == ["0", "1"]
        assert "# Wrong values       : 1 FAILED" in out


@pytest.mark.parametrize("operation", ["all_gather", "barrier"])
def test_result_file(here, operation, tmp_path, capsys):
    file = here.comm.bcast(tmp_path) / "result.json"
    begin = [] if operation == "barrier" else ["-b", "1", "-e", "1000"]
    assert sweep.run(options(operation, *begin, "-n", "3", "--json", str(file))) == 0
    if here.rank == 0:
        document = json.loads(file.read_text())
        points = [results.Point(**row) for row in document["rows"]]
        assert {len(document["environment"]["ranks"]), *(point.ranks for point in points)} == {here.size}
        sizes = [0] if operation == "barrier" else [4 * here.size, 1000 // 4 // here.size * 4 * here.size]
        assert [point.size_bytes for point in points] == sizes
        assert all(0 < point.min_s <= point.median_s <= point.max_s for point in points)
        assert all(point.wrong == 0 and point.iterations == 3 for point in points)


def test_file_that_cannot_be_written_is_an_error_on_all_ranks(here, capsys):
    with pytest.raises(UsageError, match="cannot write /proc/nowhere"):
        sweep.run(options("barrier", "-n", "1", "--json", "/proc/nowhere/file.json"))


@pytest.mark.parametrize("operation", ["all_reduce", "gather", "send_recv"])
def test_unknown_algorithm_is_a_usage_error(here, capsys, operation):
    with pytest.raises(UsageError, match=f"{operation}:rink"):
        sweep.run(options(operation, "--algorithm", "rink"))
    dist.barrier()


def test_reduction_that_means_nothing_is_a_usage_error(here):
    with pytest.raises(UsageError, match="--op exact_sum --dtype int32"):
        sweep.run(options("all_reduce", "--op", "exact_sum", "--dtype", "int32"))


@pytest.mark.mpi(min_size=2)
def test_time_is_that_of_the_slowest_rank(here):
    def call() -> None:
        if here.rank == 1:
            time.sleep(0.03)

    took = here.clock.each(call, 3)
    assert min(took) >= 0.03
    assert here.comm.allreduce(tuple(took), lazy.MPI.MAX) == tuple(took), "ranks know different times"


def test_arrays_are_written_before_each_call(here):
    seen, x = [], np.zeros(3)

    def before() -> None:
        x[...] += 1

    here.clock.each(lambda: seen.append(x[0]), 4, before)
    assert seen == [1, 2, 3, 4]


def test_ways_take_turns_in_rotating_order(here):
    order: list[str] = []
    ways = {name: Way(lambda name=name: order.append(name), 2) for name in "ab"}
    took = here.clock.take_turns(ways, 3)
    assert "".join(order) == "aaabbb" + "bbbaaa" + "aaabbb"  # one call of each turn is not measured
    assert {name: [len(turn) for turn in turns] for name, turns in took.items()} == {"a": [2, 2, 2], "b": [2, 2, 2]}


@pytest.fixture
def lines(here, capsys):
    def run() -> list[str]:
        assert tune.run(options("tune", "-b", "1K", "-e", "2K", "--rounds", "1")) == 0
        return here.comm.bcast(capsys.readouterr().out.splitlines())

    return run


@pytest.mark.mpi(min_size=2)
def test_tune_prints_a_line_that_can_be_set(here, lines, monkeypatch, choose):
    def ring_is_best(here, contenders, arguments, *limits):
        times = {each.name: 1.0 if each.algorithm == "ring" else 2.0 for each in contenders}
        yield {
            name: results.Point(name, arguments.operation, "float32", "sum", here.size, 1024, 256, s, s, s, [s], 1, 1.0)
            for name, s in times.items()
        }

    monkeypatch.setattr(tune, "measure", ring_is_best)
    line = lines()[-1].rpartition("MPIDDP_ALGORITHM=")[2]
    assert line == "all_reduce:ring,reduce_scatter:ring,all_gather:ring"
    choose(ALGORITHM=line)
    assert plan.algorithm_of("all_reduce", dist.group.WORLD._link, 8) == "ring"
    with pytest.raises(UsageError, match="unset it"):
        lines()


@pytest.mark.mpi(min_size=2)
def test_tune_measures_every_candidate_and_marks_the_tables(here, lines):
    link = dist.group.WORLD._link
    printed = lines()
    for operation in plan.ONE_NODE:
        start = next(index for index, line in enumerate(printed) if line.startswith(f"# {operation}: "))
        names = printed[start + 1].split()[1:]
        assert names == tune.candidates(operation, link)
        for row in printed[start + 2 : start + 4]:
            marked = [name for name, cell in zip(names, row.split()[1:], strict=True) if cell.startswith("*")]
            assert marked == [plan.algorithm_of(operation, link, 1 << 10)]
    assert "MPIDDP_ALGORITHM=" in printed[-1] or "nothing to set" in printed[-1]


def test_a_row_is_slower_beyond_a_tenth_and_three_microseconds():
    def points(name, operation, *microseconds):
        for size, us in enumerate(microseconds):
            yield results.Point(name, operation, "float32", "sum", 2, 8**size, 1, us * 1e-6, 0, 0, [], 1, 1.0)

    theirs = [*points("mpi4py", "reduce", 1, 1, 100, 100), *points("mpi4py", "gather", 1)]
    ours = [*points("mpiddp", "reduce", 4, 4.2, 112, 114), *points("mpiddp", "scatter", 9)]
    assert compare.count_slower([*ours, *theirs, *points("mpiddp symmetric", "reduce", 99)]) == (2, 4)
