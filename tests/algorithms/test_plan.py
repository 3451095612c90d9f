"""The table that chooses algorithms, and what overrides it."""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness.world import forget_plans

import mpiddp as dist
from mpiddp import settings
from mpiddp.algorithms import exchange, fallback, hierarchical, native, plan, ring, tree, two_shot
from mpiddp.cores import cores
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.shm import eager

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3)]


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MPIDDP_ALGORITHM", raising=False)
    monkeypatch.delenv("MPIDDP_DETERMINISTIC", raising=False)
    forget_plans()
    yield
    monkeypatch.undo()
    forget_plans()


TABLES = {"one node": plan.ONE_NODE, "crowded": plan.CROWDED, "several nodes": plan.SEVERAL_NODES}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_names_an_algorithm_that_can(table: dict[str, plan.Rows]) -> None:
    for operation, rows in table.items():
        limits = [limit for limit, _ in rows]
        assert limits == sorted(limits) and limits[-1] == plan.ANY_SIZE
        assert all(name in ["short", *plan.offering(operation)] for _, name in rows)
        assert table is not plan.SEVERAL_NODES or all(not name.endswith("_shot") for _, name in rows)


class Pretended:
    """As much of a link as the table looks at: a group whose rank r is on node ``nodes[r]``."""

    members: Any = None

    def __init__(self, *nodes: int, eager: bool = True, crowded: bool = False) -> None:
        self.size, self.one_node, self._some = len(nodes), len(set(nodes)) == 1, eager
        self.world, self.crowded = self, crowded

    def find(self, kind: type) -> object:
        return kind if self._some and eager.region_bytes(self) else None  # type: ignore[arg-type]


def steps(link: Any, operation: str, algorithm: str | None, x: Any, op: ReduceOp = ReduceOp.SUM) -> Any:
    return inspect.unwrap(plan.make(link, operation, algorithm, x, x, op).steps)  # from the comparison of calls


def test_on_a_node_most_arrays_go_through_its_memory(world: Any) -> None:
    link = default_group()._link
    assert link.world.crowded == (world.size > len(set().union(*link.now.allgather(cores()))))
    short, long = np.zeros(10), np.zeros(1 << 20)
    found = plan.make(link, "all_reduce", None, short, short, ReduceOp.SUM)
    shown = world.size > 1 and settings.eager()
    assert found.run is not None if shown else inspect.unwrap(found.steps) is native.all_reduce
    found = plan.make(link, "all_reduce", None, long, long, ReduceOp.SUM)
    algorithm = two_shot if world.size > 1 else native
    assert found.run is not None if shown else inspect.unwrap(found.steps) is algorithm.all_reduce
    assert plan.algorithm_of("all_reduce", link, short.nbytes) == ("one_shot" if shown else "native")
    assert plan.algorithm_of("all_reduce", link, long.nbytes) == ("two_shot" if world.size > 1 else "native")


def test_many_ranks_and_those_without_eager_buffers_send_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_EAGER", raising=False)
    most = eager.MAX_RANKS
    assert plan.rows("all_reduce", Pretended(*[0] * most))[0][1] == "one_shot"  # type: ignore[arg-type]
    assert plan.rows("reduce", Pretended(*[0] * (most + 1)))[0][1] == "native"  # type: ignore[arg-type]
    assert plan.rows("broadcast", Pretended(0, 0, crowded=True)) == plan.CROWDED["broadcast"]  # type: ignore[arg-type]
    several: list[Any] = [Pretended(*[0] * (most + 1)), Pretended(0, 1), Pretended(0, 0, eager=False)]
    for link in several:
        assert all(name != "one_shot" for operation in plan.ONE_NODE for _, name in plan.rows(operation, link))
        assert plan.algorithm_of("all_reduce", link, 8) == ("native" if link.one_node else "short")
    monkeypatch.setenv("MPIDDP_EAGER", "0")
    assert plan.rows("all_reduce", Pretended(0, 0))[0][1] == "native"  # type: ignore[arg-type]


def test_what_mpi_does_not_define_is_exchanged() -> None:
    link, half = default_group()._link, np.zeros(10, np.float16)
    assert steps(link, "all_reduce", "native", half) is exchange.all_reduce
    assert steps(link, "reduce", "native", np.zeros(10), ReduceOp.MAX) is exchange.reduce


def test_what_mpi_does_not_define_goes_by_tree_where_it_is_short_and_ranks_are_many() -> None:
    several, fewer, one_node = Pretended(*[0] * 8, 1), Pretended(*[0] * 7, 1), Pretended(*[0] * 9)

    def chosen(
        link: Any, dtype: str, size_bytes: int, operation: str = "all_reduce", algorithm: str | None = "native"
    ) -> Any:
        x = np.zeros(size_bytes // np.dtype(dtype).itemsize, dtype)
        return steps(link, operation, algorithm, x, ReduceOp.MAX)

    short, long = fallback.SHORT_BYTES, fallback.SHORT_BYTES + 4
    assert chosen(several, "float32", short) is tree.all_reduce
    assert chosen(several, "float32", short, "reduce") is tree.reduce
    assert chosen(several, "float32", long) is exchange.all_reduce
    assert chosen(several, "float32", short, "reduce_scatter") is exchange.reduce_scatter
    assert chosen(several, "int32", short) is native.all_reduce
    assert chosen(fewer, "float32", short) is exchange.all_reduce
    assert chosen(one_node, "float32", short) is exchange.all_reduce
    by_size = [chosen(several, "float16", size, algorithm=None) for size in (short, long, 256 << 10, 512 << 10)]
    expected = [tree.all_reduce, exchange.all_reduce, exchange.all_reduce, hierarchical.all_reduce]
    assert by_size == expected, "the table's own rows go on after the short arrays"


def test_deterministic_keeps_mpi_out(choose: Any) -> None:
    choose(DETERMINISTIC="1")
    link = default_group()._link
    assert steps(link, "all_reduce", "native", np.zeros(10)) is exchange.all_reduce


@pytest.mark.parametrize("text", ["all_reduce:rnig", "allreduce:ring", "broadcast:ring", "ring", "all_reduce:"])
def test_a_wrong_override_says_what_is_there(text: str, choose: Any) -> None:
    with pytest.raises(ValueError, match=r"MPIDDP_ALGORITHM"):
        choose(ALGORITHM=text)


def test_shared_memory_is_refused_across_nodes(choose: Any) -> None:
    choose(ALGORITHM="all_reduce:two_shot")
    with pytest.raises(ValueError, match="several"):
        plan.algorithm_of("all_reduce", Pretended(0, 0, 1, 1), 1)  # type: ignore[arg-type]


def test_argument_environment_and_table_in_this_order(world: Any, choose: Any) -> None:
    choose(ALGORITHM="all_reduce:tree, broadcast:two_shot")
    link, x = default_group()._link, np.arange(10.0) + world.rank
    if world.size > 1:
        assert steps(link, "all_reduce", "ring", x) is ring.all_reduce
        assert plan.algorithm_of("broadcast", link, 8) == "two_shot"
    assert steps(link, "all_reduce", None, x) is (tree if world.size > 1 else native).all_reduce
    dist.all_reduce(x)
    assert (x == np.arange(10.0) * world.size + sum(range(world.size))).all()
    with pytest.raises(ValueError, match="no algorithm all_reduce:rnig"):
        dist.all_reduce(x, algorithm="rnig")
    with pytest.raises(ValueError, match="no algorithm broadcast:ring"):
        dist.broadcast(x, 0, algorithm="ring")
