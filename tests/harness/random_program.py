"""``RandomProgram``: operations that all ranks agree on, in several groups, waited for where each rank likes.

Every result is compared with what the ranks' numbers give. Importing it starts no MPI.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import mpiddp as dist
from harness.collectives import COLLECTIVES, OF_ONE_BLOCK, REDUCTIONS, Submitted
from harness.inputs import close, same
from mpiddp.algorithms import plan

Op = dist.ReduceOp

KINDS = [*COLLECTIVES, "barrier", "p2p", "object"]
CHOOSING = ("all_reduce", "reduce", "broadcast", "all_gather_single", "reduce_scatter_single")
"""Calls that take an algorithm."""
SIZES = (1, 5, 300, 270_000)


def lists_of_ranks(size: int) -> list[list[int]]:
    """Return the ranks of the groups: all, all in reverse order, all but the last, and the second half."""
    return [
        list(range(size)),
        list(reversed(range(size))),
        list(range(max(1, size - 1))),
        list(range(size // 2, size)),
    ]


def _expect(right: bool, *what: object) -> None:
    assert right, what


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

        def later(returned: Any, check: Callable[[], None]) -> None:
            if returned is None:
                check()
            else:
                self._pending.append((returned, check))

        if kind == "barrier":
            later(dist.barrier(group, async_op), lambda: None)
        elif kind == "object":
            found = [None] * len(ranks)
            dist.all_gather_object(found, (rank, number), group=group)
            assert found == [(each, number) for each in ranks]
        elif kind == "p2p":
            for here, call, other in ((peer, dist.irecv, root), (root, dist.isend, peer)):
                if rank == here:
                    x = self.allocate(place, count)
                    x[...] = root + number if call is dist.isend else -1
                    work = call(x, other, group=group, tag=drawn[0])
                    later(work, lambda x=x: _expect((x == root + number).all(), number, kind))
        else:
            self._collective(number, kind, place, async_op, count, op, drawn, later)

    def _collective(
        self, number: int, kind: str, place: int, async_op: bool, count: int, op: Op, drawn: list[int], later: Any
    ) -> None:
        ranks, group = self._lists[place], self.groups[place]
        how: dict[str, Any] = {"group": group, "async_op": async_op}
        operation = kind.removesuffix("_single")
        if kind in CHOOSING:
            how["algorithm"] = _drawn_algorithm(operation, group, drawn[2])

        def make(x: np.ndarray) -> np.ndarray:
            made = self.allocate(place, x.size).reshape(x.shape)
            made[...] = x
            return made

        receivers = range(1 if kind in OF_ONE_BLOCK else len(ranks))
        table = [[np.full(count, 10.0 * each + to + number) for to in receivers] for each in range(len(ranks))]
        at = Submitted(ranks.index(self._rank), table, drawn[0] % len(ranks), op, how, make, dist, ranks)
        found, expected = COLLECTIVES[kind](at)
        compare = close if kind in REDUCTIONS else same

        def check() -> None:
            _expect(all(compare(x, y) for x, y in zip(found, expected, strict=True)), number, kind, how)
            _expect(all(same(x, y) for x, y in at.kept), number, kind, how)

        later(at.returned, check)

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
    in_memory = ("one_shot", "two_shot", *plan.WAYS)
    names = [name for name in plan.offering(operation) if group._link.one_node or name not in in_memory]
    return [None, *names][number % (len(names) + 1)]
