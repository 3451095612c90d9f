"""What an operation waits for, and how everything that is on its way in this process is helped on.

An algorithm yields what it waits for, which answers ``Test()`` and ``Wait()`` as MPI requests do. MPI makes progress
only inside MPI calls, and steps only when somebody drives them: `poll` drives everything.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from .lazy import MPI


class Awaited(Protocol):
    """What a step waits for: an MPI request, a CUDA event, several of them."""

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """Tell whether it has happened, and help it on."""

    def Wait(self) -> object:  # noqa: N802 - MPI's name
        """Block until it has happened."""


Steps = Generator[Awaited, None, Any]


class All:
    """Several MPI requests as one, those of receives first."""

    __slots__ = ("requests",)

    one_by_one = False
    """Whether none is tested before those that stand before it are complete.

    Open MPI ends the process when a message fails whose request has been completed together with one that failed.
    """

    def __init__(self, requests: list[MPI.Request]) -> None:
        self.requests = requests

    def Test(self) -> bool:  # noqa: N802
        """Tell whether all of them are complete."""
        if self.one_by_one:
            return all(request.Test() for request in self.requests)
        return MPI.Request.Testall(self.requests)

    def Wait(self) -> None:  # noqa: N802
        """Block until all of them are complete."""
        MPI.Request.Waitall(self.requests)


class Each:
    """Several things that are waited for, of any kind, as one."""

    __slots__ = ("_left",)

    def __init__(self, awaited: list[Awaited]) -> None:
        self._left = awaited

    def Test(self) -> bool:  # noqa: N802
        """Tell whether all of them have happened, and help each on."""
        self._left = [each for each in self._left if not each.Test()]
        return not self._left

    def Wait(self) -> None:  # noqa: N802
        """Block until all of them have happened."""
        while self._left:
            self._left[0].Wait()
            del self._left[0]


def drive(steps: Steps) -> Any:
    """Run ``steps`` to their end, blocking in each wait."""
    try:
        while True:
            next(steps).Wait()
    except StopIteration as end:
        return end.value


class Progress(Protocol):
    """Something with operations on their way: a group's queue, or its mailbox."""

    def progress(self) -> None:
        """Drive them as far as they go without waiting."""


_active: dict[Progress, None] = {}


def activate(source: Progress) -> None:
    """Let `poll` drive ``source`` until it says that it is idle."""
    _active[source] = None


def deactivate(source: Progress) -> None:
    """Stop driving ``source``."""
    _active.pop(source, None)


def poll() -> None:
    """Drive everything that is on its way in this process as far as it goes without waiting."""
    for source in tuple(_active):
        source.progress()
