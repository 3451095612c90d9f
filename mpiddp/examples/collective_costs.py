"""``python -m mpiddp.examples.collective_costs``: the savings of collectives, counted for 8 ranks.

A broadcast from its root alone is 7 messages, one after the other; in a tree all ranks that have the array spread it:
1, 2, 4 messages at once, 3 rounds. A reduction is the same backwards. An all_reduce of two trees has 6 rounds,
recursive doubling 3; the ring sends parts of the array and keeps all links busy. mpiddp sums in the memory of each
machine first and sends slices between machines; traffic through memory is not counted.

Machines send and receive 20 MB/s each at the same time, without latency. The same schedules as real messages:
``mpiddp/bench/README.md``.

Output::

    8 ranks, an array of 100 MB, 20 MB/s                   messages  rounds     MB on the  seconds
                                                                             busiest link
    broadcast, rank 0 to each                                     7       7           700    35.00
    broadcast, tree                                               7       3           300    15.00
    reduce, each to rank 0                                        7       7           700    35.00
    reduce, tree                                                  7       3           300    15.00
    all_reduce, each to rank 0 and back                          14      14          1400    70.00
    all_reduce, reduce then broadcast, trees                     14       6           600    30.00
    all_reduce, tree (recursive doubling)                        24       3           600    15.00
    all_reduce, ring                                            112      14           350     8.75
    all_reduce, mpiddp on 8 machines                            112      14           350     8.75
    all_reduce, mpiddp on 2 machines with 4 ranks each           16       2           200     5.00
    all_reduce, mpiddp on 1 machine                               0       0             0     0.00
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from mpiddp.examples.printing import on_first_rank

RANKS = 8
ARRAY_MB = 100
LINK_MB_PER_S = 20


class Message(NamedTuple):
    """A message and its parts of the array, which has as many as there are ranks."""

    src: int
    dst: int
    parts: tuple[int, ...] = tuple(range(RANKS))


Rounds = list[list[Message]]
"""Simultaneous messages, one round after the other."""


def backwards(rounds: Rounds) -> Rounds:
    """Return a broadcast as a reduction, or the reverse."""
    return [[Message(m.dst, m.src, m.parts) for m in messages] for messages in reversed(rounds)]


def one_to_each() -> Rounds:
    return [[Message(0, rank)] for rank in range(1, RANKS)]


def tree() -> Rounds:
    """Broadcast along a binomial tree."""
    return [[Message(rank, rank + reach) for rank in range(reach)] for reach in (1, 2, 4)]


def doubling() -> Rounds:
    """Swap sums with partners at distance 1, 2, 4."""
    return [[Message(rank, rank ^ distance) for rank in range(RANKS)] for distance in (1, 2, 4)]


def ring() -> Rounds:
    """Gather sums around a ring, then hand them around."""
    return [
        [Message(rank, (rank + 1) % RANKS, ((rank - step) % RANKS,)) for rank in range(RANKS)]
        for step in range(2 * (RANKS - 1))
    ]


def exchange() -> Rounds:
    """Let each of 8 machines sum its slice and hand it out."""
    away = range(1, RANKS)
    there = [[Message(r, (r + by) % RANKS, ((r + by) % RANKS,)) for r in range(RANKS)] for by in away]
    back = [[Message(r, (r + by) % RANKS, (r,)) for r in range(RANKS)] for by in away]
    return there + back


def crossing() -> Rounds:
    """All-reduce on 2 machines of 4 ranks, each with its machine's sum of a quarter of the array."""
    there = [Message(r, (r + 4) % 8, (2 * (r % 4) + (r < 4),)) for r in range(RANKS)]
    back = [Message(r, (r + 4) % 8, (2 * (r % 4) + (r >= 4),)) for r in range(RANKS)]
    return [there, back]


def busiest_link_mb(rounds: Rounds, ranks_per_machine: int) -> float:
    """Return the traffic of the busiest machine, sent and received."""
    parts: Counter[int] = Counter()
    for message in (message for messages in rounds for message in messages):
        for rank in (message.src, message.dst):
            parts[rank // ranks_per_machine] += len(message.parts)
    return max(parts.values(), default=0) * ARRAY_MB / RANKS


def seconds(rounds: Rounds, ranks_per_machine: int) -> float:
    """Return the seconds, if each round ends with its busiest link."""
    total_mb = 0.0
    for messages in rounds:
        parts: Counter[tuple[str, int]] = Counter()
        for message in messages:
            parts["out", message.src // ranks_per_machine] += len(message.parts)
            parts["in", message.dst // ranks_per_machine] += len(message.parts)
        total_mb += max(parts.values()) * ARRAY_MB / RANKS
    return total_mb / LINK_MB_PER_S


def table() -> list[tuple[str, Rounds, int]]:
    return [
        ("broadcast, rank 0 to each", one_to_each(), 1),
        ("broadcast, tree", tree(), 1),
        ("reduce, each to rank 0", backwards(one_to_each()), 1),
        ("reduce, tree", backwards(tree()), 1),
        ("all_reduce, each to rank 0 and back", backwards(one_to_each()) + one_to_each(), 1),
        ("all_reduce, reduce then broadcast, trees", backwards(tree()) + tree(), 1),
        ("all_reduce, tree (recursive doubling)", doubling(), 1),
        ("all_reduce, ring", ring(), 1),
        ("all_reduce, mpiddp on 8 machines", exchange(), 1),
        ("all_reduce, mpiddp on 2 machines with 4 ranks each", crossing(), 4),
        ("all_reduce, mpiddp on 1 machine", [], 8),
    ]


def main() -> None:
    if not on_first_rank():
        return
    title = f"{RANKS} ranks, an array of {ARRAY_MB} MB, {LINK_MB_PER_S} MB/s"
    print(f"{title:<52}{'messages':>11}{'rounds':>8}{'MB on the':>14}{'seconds':>9}")
    print(f"{'busiest link':>85}")
    for name, rounds, ranks_per_machine in table():
        messages = sum(len(each) for each in rounds)
        busiest_mb, counted_s = busiest_link_mb(rounds, ranks_per_machine), seconds(rounds, ranks_per_machine)
        print(f"{name:<52}{messages:>11}{len(rounds):>8}{busiest_mb:>14.0f}{counted_s:>9.2f}", flush=True)


if __name__ == "__main__":
    main()
