"""Every collective on drawn blocks of all ranks, against NumPy, with the arrays of any library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mpiddp as dist
from harness.inputs import Op, close, draw, end, means_something, own_op, reduced, same


@dataclass
class Blocks:
    """The blocks that ranks have for each other, and the arrays that a call was given."""

    rank: int
    table: list[list[np.ndarray]]
    """Rank s has ``table[s][r]`` for rank r, and, where a rank has one array only, ``table[s][0]``."""
    root: int
    op: Op
    how: dict[str, Any]
    make: Callable[[np.ndarray], Any]
    library: Any
    ranks: Sequence[int] = ()
    """In the default group, of the ranks of the call's group; of all in their order, if none are given."""
    kept: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    """Arrays that stay as they are, and what they were."""

    def given(self, x: np.ndarray) -> Any:
        """Return an input."""
        made = self.make(x.copy())
        self.kept.append((made, x))
        return made

    def empty(self, like: np.ndarray) -> Any:
        return self.make(np.zeros_like(like))

    @property
    def at_root(self) -> int:
        return self.ranks[self.root] if self.ranks else self.root

    def call(self, name: str, *args: Any) -> None:
        returned = getattr(self.library, name)(*args, **self.how)
        if self.library is dist:
            end(returned, {"async_op": True} if self.how.get("async_op") else {})
        else:
            assert returned.wait() if self.how.get("async_op") else returned is None

    @property
    def mine(self) -> np.ndarray:
        return self.table[self.rank][0]

    @property
    def all_ranks(self) -> list[np.ndarray]:
        return [row[0] for row in self.table]

    @property
    def for_me(self) -> list[np.ndarray]:
        return [row[self.rank] for row in self.table]

    def whole(self, blocks: list[np.ndarray]) -> np.ndarray:
        """Return blocks one behind the other, or stacked, which Gloo does not know."""
        return np.stack(blocks) if self.library is dist and self.root % 2 == 0 else joined(blocks)

    @property
    def own(self) -> Any:
        op = own_op(self.op, self.rank)
        return op if self.library is dist else getattr(self.library.ReduceOp, op.name)


class Submitted(Blocks):
    """Keeps what the call has returned, and waits for nothing."""

    returned: Any = None

    def call(self, name: str, *args: Any) -> None:
        self.returned = getattr(dist, name)(*args, **self.how)


Outcome = tuple[list[Any], list[np.ndarray]]
"""Arrays that were written to, and what they should be."""


def joined(blocks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.atleast_1d(x) for x in blocks])


def _all_reduce(at: Blocks) -> Outcome:
    at.call("all_reduce", x := at.make(at.mine.copy()), at.own)
    return [x], [reduced(at.op, at.all_ranks)]


def _reduce(at: Blocks) -> Outcome:
    at.call("reduce", x := at.make(at.mine.copy()), at.at_root, at.own)
    if at.rank != at.root and at.library is not dist:
        return [], []  # torch leaves there what it likes
    return [x], [reduced(at.op, at.all_ranks) if at.rank == at.root else at.mine]


def _reduce_scatter(at: Blocks) -> Outcome:
    output = at.empty(at.mine)
    at.call("reduce_scatter", output, [at.given(x) for x in at.table[at.rank]], at.own)
    return [output], [reduced(at.op, at.for_me)]


def _reduce_scatter_single(at: Blocks) -> Outcome:
    given, name = at.given(at.whole(at.table[at.rank])), "scatter_single" if at.library is dist else "scatter_tensor"
    at.call(f"reduce_{name}", output := at.empty(at.mine), given, at.own)
    return [output], [reduced(at.op, at.for_me)]


def _broadcast(at: Blocks) -> Outcome:
    at.call("broadcast", x := at.make(at.mine.copy()), at.at_root)
    return [x], [at.table[at.root][0]]


def _all_gather(at: Blocks) -> Outcome:
    outputs = [at.empty(x) for x in at.all_ranks]
    at.call("all_gather", outputs, at.given(at.mine))
    return outputs, at.all_ranks


def _all_gather_single(at: Blocks) -> Outcome:
    expected, name = at.whole(at.all_ranks), "gather_single" if at.library is dist else "gather_into_tensor"
    at.call(f"all_{name}", output := at.empty(expected), at.given(at.mine))
    return [output], [expected]


def _gather(at: Blocks) -> Outcome:
    expected = [row[at.root] for row in at.table] if at.rank == at.root else []
    outputs = [at.empty(x) for x in expected]
    at.call("gather", at.given(at.table[at.rank][at.root]), outputs or None, at.at_root)
    return outputs, expected


def _scatter(at: Blocks) -> Outcome:
    row = at.table[at.root]
    given = [at.given(x) for x in row] if at.rank == at.root else None
    at.call("scatter", output := at.empty(row[at.rank]), given, at.at_root)
    return [output], [row[at.rank]]


def _all_to_all(at: Blocks) -> Outcome:
    outputs = [at.empty(x) for x in at.for_me]
    at.call("all_to_all", outputs, [at.given(x) for x in at.table[at.rank]])
    return outputs, at.for_me


def _all_to_all_single(at: Blocks) -> Outcome:
    expected, sent = joined(at.for_me), at.table[at.rank]
    equal = len({x.shape for row in at.table for x in row}) == 1
    splits = [] if equal else [[len(x) for x in blocks] for blocks in (at.for_me, sent)]
    at.call("all_to_all_single", output := at.empty(expected), at.given(joined(sent)), *splits)
    return [output], [expected]


REDUCTIONS: dict[str, Callable[[Blocks], Outcome]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
}
UNEVEN: dict[str, Callable[[Blocks], Outcome]] = {
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}
"""Collectives that take blocks of different shapes."""
COLLECTIVES = {
    **REDUCTIONS,
    **UNEVEN,
    "broadcast": _broadcast,
    "all_gather_single": _all_gather_single,
}
OF_ONE_BLOCK = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single")


def check(
    world: Any,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...] | Callable[[int, int], tuple[int, ...]],
    how: dict[str, Any] | None = None,
    *,
    op: Op = Op.SUM,
    root: int | None = None,
    make: Callable[[np.ndarray], Any] = np.asarray,
    read: Callable[[Any], np.ndarray] = np.asarray,
    library: Any = dist,
) -> None:
    """Make a call on all ranks of ``world``, whose ``rng`` draws: results are right, and inputs what they were.

    ``make`` and ``read`` change a NumPy array into one of another library, and back; ``library`` may be torch's. The
    blocks have one shape, or one that depends on sender and receiver. A reduction that a dtype does not have is a
    TypeError.
    """
    rng, ranks = world.rng, range(world.size)
    receivers = ranks[:1] if name in OF_ONE_BLOCK else ranks
    shapes = shape if callable(shape) else lambda sender, receiver: shape
    table = [[draw(rng, 1, shapes(sender, receiver), dtype)[0] for receiver in receivers] for sender in ranks]
    drawn = int(rng.integers(world.size))
    at = Blocks(world.rank, table, drawn if root is None else root, op, how or {}, make, library)
    what = (name, op, dtype, shape, how, at.root)
    if name in REDUCTIONS and not means_something(op, dtype):
        try:
            COLLECTIVES[name](at)
        except TypeError as error:
            assert op.name in str(error) and ("dtype" in str(error) or "numbers" in str(error)), (what, error)
            return
        raise AssertionError(f"{what} went on")
    found, expected = COLLECTIVES[name](at)
    compare = close if name in REDUCTIONS else same
    assert all(compare(read(x), y) for x, y in zip(found, expected, strict=True)), what
    assert all(same(read(x), y) for x, y in at.kept), (what, "an input was written to")
