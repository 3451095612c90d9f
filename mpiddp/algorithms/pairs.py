"""The order of a sum in pairs over virtual ranks, which is the same on any number of ranks.

The virtual ranks are the leaves of a binary tree that halves them again and again. Each rank has one subtree, so it
sends one array, and only the order in which the ranks' arrays are added differs from a chain. The order is written as
in postfix notation: a number after each addend says how many sums are complete with it.
"""

from collections.abc import Sequence


def _halves(part: range) -> tuple[range, range]:
    middle = (part.start + part.stop + 1) // 2
    return range(part.start, middle), range(middle, part.stop)


def shares(leaves: int, ranks: int) -> list[range]:
    """Return the subtree of each rank. The largest subtree is halved until there is one for each rank.

    >>> shares(8, 3)
    [range(0, 2), range(2, 4), range(4, 8)]
    """
    if not 1 <= ranks <= leaves:
        raise ValueError(
            f"{leaves} virtual ranks can be shared by 1 to {leaves} ranks, and there are {ranks}; give more virtual"
            " ranks, or start fewer ranks"
        )
    parts = [range(leaves)]
    while len(parts) < ranks:
        at = max(range(len(parts)), key=lambda index: len(parts[index]))
        parts[at : at + 1] = _halves(parts[at])
    return parts


def merges(whole: range, parts: Sequence[range]) -> tuple[int, ...]:
    """Return how many sums are complete after each part.

    ``whole`` is a range of addends, which a binary tree adds; each part is one of the tree's subtrees.

    >>> merges(range(8), shares(8, 3))
    (0, 1, 1)
    """
    if len(parts) == 1:
        return (0,)
    left, right = _halves(whole)
    cut = sum(part.start < right.start for part in parts)
    counts = merges(left, parts[:cut]) + merges(right, parts[cut:])
    return (*counts[:-1], counts[-1] + 1)
