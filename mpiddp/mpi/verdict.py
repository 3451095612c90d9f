"""Answers that carry how they are known. Imports nothing of mpiddp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Verdict(NamedTuple):
    """A yes or no, and how it is known."""

    yes: bool
    reason: str


class DevicePointers(NamedTuple):
    """What may be done with addresses of GPU memory; the same on all ranks."""

    point_to_point: Verdict
    """Whether ``Isend`` and ``Irecv`` take them."""
    collectives: Verdict
    """Whether non-blocking collectives take them, reductions among them."""


KINDS = DevicePointers._fields
"""What is found out apart, because one may crash where the other works."""


def lowest(answers: Sequence[Verdict], rank: int) -> Verdict:
    """Return what ``rank`` has to go by when every rank has given its answer: a no of anybody is everybody's.

    Examples
    --------
    >>> lowest([Verdict(True, "asked"), Verdict(False, "other library")], 0)
    Verdict(yes=False, reason='rank 1 cannot: other library')
    """
    mine = answers[rank]
    against = next((other for other, answer in enumerate(answers) if not answer.yes), None)
    if against is None or not mine.yes:
        return mine
    return Verdict(False, f"rank {against} cannot: {answers[against].reason}")
