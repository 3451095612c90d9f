"""The table that chooses algorithms, and what overrides it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpiddp as dist
from mpiddp.algorithms import exchange, fallback, native, one_shot, plan, ring, tree, two_shot
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.reduction import ReduceOp


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MPIDDP_ALGORITHM", raising=False)
    monkeypatch.delenv("MPIDDP_DETERMINISTIC", raising=False)
    plan.forget()
    yield
    monkeypatch.undo()
    plan.forget()


TABLES = {"one node": plan.ONE_NODE, "several nodes": plan.SEVERAL_NODES, "two ranks": plan.TWO_RANKS}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_names_an_algorithm_that_can(table: dict[str, plan.Rows]) -> None:
    for operation, rows in table.items():
        limits = [limit for limit, _ in rows]
        assert limits == sorted(limits) and limits[-1] == plan.ANY_SIZE
        assert all(name in plan.offering(operation) for _, name in rows)
        assert table is not plan.SEVERAL_NODES or all(not name.endswith("_shot") for _, name in rows)


def test_on_a_node_most_arrays_go_through_its_memory(world: Any) -> None:
    link = default_group().link
    short, long = np.zeros(10), np.zeros(1 << 20)
    one, two = (one_shot, two_shot) if world.size > 1 else (native, native)
    assert plan.choose("all_reduce", link, short, ReduceOp.SUM) is one.all_reduce
    assert plan.choose("all_reduce", link, long, ReduceOp.SUM) is two.all_reduce
    assert plan.algorithm_of("all_reduce", link, long.nbytes) == ("two_shot" if world.size > 1 else "native")


def test_many_ranks_and_those_without_slots_send_messages() -> None:
    assert plan._rows("all_reduce", (0,) * 8)[0][1] == "one_shot"
    assert plan._rows("reduce", (0,) * 9)[0][1] == "native"
    for nodes in [(0,) * 9, (0, 1)]:
        assert all(name != "one_shot" for operation in plan.ONE_NODE for _, name in plan._rows(operation, nodes))

    class Bare:
        id, size, one_node, nodes, slots = -1, 2, True, (0, 0), None

    assert plan.algorithm_of("all_reduce", Bare(), 8) == "native"  # type: ignore[arg-type]


def test_two_ranks_have_rows_of_their_own() -> None:
    chosen = {
        nodes: next(name for limit, name in plan._rows("broadcast", nodes) if limit >= 1 << 15)
        for nodes in [(0, 0), (0, 0, 0), (0, 1)]
    }
    assert chosen == {(0, 0): "native", (0, 0, 0): "one_shot", (0, 1): "native"}
    assert plan._rows("all_reduce", (0, 0)) == plan.ONE_NODE["all_reduce"]


def test_what_mpi_does_not_define_is_exchanged() -> None:
    link, half = default_group().link, np.zeros(10, np.float16)
    assert plan.choose("all_reduce", link, half, ReduceOp.SUM, "native") is exchange.all_reduce
    assert plan.choose("reduce", link, np.zeros(10), ReduceOp.MAX, "native") is exchange.reduce


def test_what_mpi_does_not_define_goes_by_tree_where_it_is_short_and_ranks_are_many() -> None:
    class Several:
        id, size, one_node, nodes, slots = -2, 9, False, (0,) * 8 + (1,), None

    class Fewer:
        id, size, one_node, nodes, slots = -3, 8, False, (0,) * 7 + (1,), None

    class OneNode:
        id, size, one_node, nodes, slots = -4, 9, True, (0,) * 9, None

    def chosen(link: Any, dtype: str, size_bytes: int, operation: str = "all_reduce") -> Any:
        x = np.zeros(size_bytes // np.dtype(dtype).itemsize, dtype)
        return plan.choose(operation, link, x, ReduceOp.MAX, "native")

    short, long = fallback.SHORT_BYTES, fallback.SHORT_BYTES + 4
    assert chosen(Several, "float32", short) is tree.all_reduce
    assert chosen(Several, "float32", short, "reduce") is tree.reduce
    assert chosen(Several, "float32", long) is exchange.all_reduce
    assert chosen(Several, "float32", short, "reduce_scatter") is exchange.reduce_scatter
    assert chosen(Several, "int32", short) is native.all_reduce
    assert chosen(Fewer, "float32", short) is exchange.all_reduce
    assert chosen(OneNode, "float32", short) is exchange.all_reduce
    several: Any = Several
    limits = [
        limit for limit, _ in plan._plan((-2, "all_reduce", np.dtype("f2"), ReduceOp.SUM, np.ndarray, None), several)
    ]
    assert limits == [short, 64 << 10, plan.ANY_SIZE], "the table's own rows go on after the short arrays"


def test_deterministic_keeps_mpi_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_DETERMINISTIC", "1")
    plan.forget()
    link = default_group().link
    assert plan.choose("all_reduce", link, np.zeros(10), ReduceOp.SUM, "native") is exchange.all_reduce


def test_the_environment_overrides(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_ALGORITHM", "all_reduce:ring, broadcast:two_shot")
    plan.forget()
    x = np.arange(10.0) + world.rank
    if world.size > 1:
        assert plan.choose("all_reduce", default_group().link, x, ReduceOp.SUM) is ring.all_reduce
        assert plan.algorithm_of("broadcast", default_group().link, 8) == "two_shot"
    dist.all_reduce(x)
    assert (x == np.arange(10.0) * world.size + sum(range(world.size))).all()


@pytest.mark.parametrize("text", ["all_reduce:rnig", "allreduce:ring", "broadcast:ring", "ring", "all_reduce:"])
def test_a_wrong_override_says_what_is_there(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_ALGORITHM", text)
    with pytest.raises(ValueError, match=r"MPIDDP_ALGORITHM"):
        plan.forget()


def test_shared_memory_is_refused_across_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_ALGORITHM", "all_reduce:two_shot")
    plan.forget()

    class Apart:
        size, one_node = 4, False

    with pytest.raises(ValueError, match="several"):
        plan.algorithm_of("all_reduce", Apart(), 1)  # type: ignore[arg-type]


def test_the_argument_goes_before_table_and_environment(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_ALGORITHM", "all_reduce:tree")
    plan.forget()
    link, x = default_group().link, np.ones(10)
    if world.size > 1:
        assert plan.choose("all_reduce", link, x, ReduceOp.SUM, "ring") is ring.all_reduce
    assert plan.choose("all_reduce", link, x, ReduceOp.SUM).__module__.endswith("tree" if world.size > 1 else "native")
    ones = np.ones(world.size)
    for name in ("ring", "one_shot", "two_shot", "exchange"):
        x = ones.copy()
        dist.all_reduce(x, algorithm=name)
        dist.reduce_scatter_single(y := np.empty(1), ones, algorithm=name)
        assert (x == world.size).all() and y == world.size
        gathered = np.empty(world.size)
        dist.all_gather_single(
            gathered, np.full(1, float(world.rank)), algorithm="native" if name == "exchange" else name
        )
        assert np.array_equal(gathered, np.arange(world.size))
    x = np.full(3, world.rank)
    dist.broadcast(x, 0, algorithm="two_shot")
    dist.reduce(y := np.ones(3), 0, algorithm="tree")
    assert not x.any() and (y == (world.size if world.rank == 0 else 1)).all()
    submitted = dist.all_reduce(y, async_op=True, algorithm="ring")
    submitted.wait()
    assert (y == 2 * world.size - 1).all()
    with pytest.raises(ValueError, match="no algorithm all_reduce:rnig"):
        dist.all_reduce(x, algorithm="rnig")
    with pytest.raises(ValueError, match="no algorithm broadcast:ring"):
        dist.broadcast(x, 0, algorithm="ring")
