"""``RandomProgram``: operations that all ranks agree on, in several groups, waited for where each rank likes.

Every result is compared with what the ranks' numbers give. Importing it starts no MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp.algorithms import plan

Op = dist.ReduceOp

KINDS = ["all_reduce", "broadcast", "all_gather", "all_gather_single", "reduce", "reduce_scatter_single"]
KINDS += ["gather", "scatter", "all_to_all", "barrier", "p2p", "object"]
SIZES = (1, 5, 300, 20_000)


def lists_of_ranks(size: int) -> list[list[int]]:
    """Return the ranks of the groups: all, all in reverse order, all but the last, and the second half."""
    return [
        list(range(size)),
        list(reversed(range(size))),
        list(range(max(1, size - 1))),
        list(range(size // 2, size)),
    ]


class RandomProgram:
    """A program on the groups of `lists_of_ranks`.

    ``common``, in the same state on all ranks, draws the operations, ``mine`` the places of this rank's waits;
    ``sizes`` are elements of an array; ``allocate(place of the group, elements)`` makes a float64 array, at first an
    ordinary one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        common: np.random.Generator,
        mine: np.random.Generator,
        sizes: tuple[int, ...] = SIZES,
    ) -> None:
        self._rank, self._common, self._mine = rank, common, mine
        self._sizes = sizes
        self.allocate: Callable[[int, int], Any] = lambda place, count: np.empty(count)
        self._lists = lists_of_ranks(size)
        self.groups = [dist.new_group(ranks, sort_ranks=False) for ranks in self._lists]
        self._pending: list[tuple[Any, Callable[[], None]]] = []

    def run(self, rounds: int) -> None:
        for number in range(rounds):
            kind, place = str(self._common.choice(KINDS)), int(self._common.integers(4))
            async_op, count = bool(self._common.random() < 0.7), int(self._common.choice(self._sizes))
            op = [Op.SUM, Op.MAX, Op.AVG][int(self._common.integers(3))]
            drawn = [int(self._common.integers(100)) for _ in range(3)]
            if self._rank in self._lists[place]:
                self._operate(number, kind, place, async_op, count, op, drawn)
                self._wait_somewhere(kind, async_op)
        for index in self._mine.permutation(len(self._pending)):
            self._pending[index][0].wait()
            self._pending[index][1]()
        self._pending.clear()

    def destroy(self) -> None:
        for group in self.groups:
            dist.destroy_process_group(group)

    def _operate(
        self, number: int, kind: str, place: int, async_op: bool, count: int, op: Op, drawn: list[int]
    ) -> None:
        ranks, group, rank = self._lists[place], self.groups[place], self._rank
        root, peer = ranks[drawn[0] % len(ranks)], ranks[drawn[1] % len(ranks)]
        mine_at = ranks.index(rank)
        x = self.allocate(place, count)
        x[...] = rank + number
        values = [each + number for each in ranks]
        expected = {"SUM": sum(values), "MAX": max(values), "AVG": sum(values) / len(values)}[op.name]
        how: dict[str, Any] = {"group": group, "async_op": async_op}
        operation = kind.removesuffix("_single")
        if operation in plan.ONE_NODE and kind != "all_gather":
            how["algorithm"] = _drawn_algorithm(operation, group, drawn[2])

        def later(returned: Any, check: Callable[[], None]) -> None:
            if returned is None:
                check()
            else:
                self._pending.append((returned, check))

        def equals(found: Any, value: Any) -> Callable[[], None]:
            def check() -> None:
                assert (np.asarray(found) == value).all(), (number, kind, how, found, value)

            return check

        if kind == "all_reduce":
            later(dist.all_reduce(x, op, **how), equals(x, expected))
        elif kind == "broadcast":
            later(dist.broadcast(x, root, **how), equals(x, root + number))
        elif kind == "reduce":
            later(dist.reduce(x, root, op, **how), equals(x, expected if rank == root else rank + number))
        elif kind == "all_gather":
            rows = np.zeros((len(ranks), count))
            later(dist.all_gather(list(rows), x, **how), equals(rows.T, values))
        elif kind == "all_gather_single":
            rows = np.zeros((len(ranks), count))
            later(dist.all_gather_single(rows, x, **how), equals(rows.T, values))
        elif kind == "reduce_scatter_single":
            blocks = np.repeat(np.arange(len(ranks)), count) + x[0]
            result = expected + mine_at * (len(ranks) if op == Op.SUM else 1)
            later(dist.reduce_scatter_single(x, blocks, op, **how), equals(x, result))
        elif kind == "gather":
            gathered = np.zeros((len(ranks), count)) if rank == root else None
            check = (lambda: None) if gathered is None else equals(gathered.T, values)
            later(dist.gather(x, None if gathered is None else list(gathered), root, **how), check)
        elif kind == "scatter":
            rows = np.repeat(np.arange(len(ranks)) + number, count).reshape(-1, count).astype(float)
            later(dist.scatter(x, list(rows) if rank == root else None, root, **how), equals(x, mine_at + number))
        elif kind == "all_to_all":
            rows = np.zeros((len(ranks), 3))
            sent = [np.full(3, rank * 100.0 + to) for to in ranks]
            later(dist.all_to_all(list(rows), sent, **how), equals(rows.T, [each * 100 + rank for each in ranks]))
        elif kind == "barrier":
            later(dist.barrier(**how), lambda: None)
        elif kind == "object":
            found = [None] * len(ranks)
            dist.all_gather_object(found, (rank, number), group=group)
            assert found == [(each, number) for each in ranks]
        elif kind == "p2p":
            if rank == peer:
                later(dist.irecv(x, root, group=group, tag=drawn[0]), equals(x, root + number))
            if rank == root:
                outgoing = np.full(count, float(root + number))
                later(dist.isend(outgoing, peer, group=group, tag=drawn[0]), equals(outgoing, root + number))

    def _wait_somewhere(self, kind: str, async_op: bool) -> None:
        if self._pending and self._mine.random() < 0.4:
            self._pending.append(self._pending.pop(int(self._mine.integers(len(self._pending)))))
            if kind == "p2p" or self._mine.random() < 0.5:
                self._pending[-1][0].is_completed()
        # A wait may stand wherever what it waits for has been begun by everybody who gets that far.
        if async_op and self._pending and self._mine.random() < 0.3:
            for index in self._mine.permutation(len(self._pending))[:3]:
                self._pending[index][0].wait()
                self._pending[index][1]()


def _drawn_algorithm(operation: str, group: Any, number: int) -> str | None:
    """Return an algorithm that can do an operation in a group, or None: the one that the library chooses."""
    in_memory = ("one_shot", "two_shot")
    names = [name for name in plan.offering(operation) if group._link.one_node or name not in in_memory]
    return [None, *names][number % (len(names) + 1)]
