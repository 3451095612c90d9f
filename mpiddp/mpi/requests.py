"""Requests, pending operations, and the waits that drive them.

An algorithm is a generator that yields events with ``Test()`` and ``Wait()``, as MPI requests have. MPI makes progress
inside its calls only, and a generator when resumed: so every wait polls, and `poll` drives all that is pending in the
process. A call may block in MPI only while nothing is pending; else programs would deadlock in which one rank waits
before a small blocking call and another after it, as torch allows.

Threads may communicate, each in groups of its own. A thread holds `lock` while it drives, never while it waits.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from threading import get_ident
from typing import Any, Protocol, TypeVar

from mpiddp.errors import DistTimeoutError

from .lazy import MPI
from .operation import Operation, waiting

T = TypeVar("T")


class Awaited(Protocol):
    """An event: an MPI or CUDA request, or several."""

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        ...

    def Wait(self) -> object:  # noqa: N802 - MPI's name
        ...


Steps = Generator[Awaited, None, Any]


class _Ready:
    def Test(self) -> bool:  # noqa: N802
        return True

    def Wait(self) -> None:  # noqa: N802
        return None


READY = _Ready()
"""First yield of an algorithm that runs at the head of the queue."""


class All:
    """MPI requests as one, receives first."""

    __slots__ = ("requests",)

    one_by_one = False
    """Open MPI ends the process when a message fails whose request was completed together with one that failed."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self.requests = requests

    def Test(self) -> bool:  # noqa: N802
        if self.one_by_one:
            return all(request.Test() for request in self.requests)
        return MPI.Request.Testall(self.requests)

    def Wait(self) -> None:  # noqa: N802
        MPI.Request.Waitall(self.requests)


class Each:
    __slots__ = ("_left",)

    def __init__(self, awaited: list[Awaited]) -> None:
        self._left = awaited

    def Test(self) -> bool:  # noqa: N802
        self._left = [each for each in self._left if not each.Test()]
        return not self._left

    def Wait(self) -> None:  # noqa: N802
        while self._left:
            self._left[0].Wait()
            del self._left[0]


def drive(steps: Steps) -> Any:
    """Block in each wait; return the steps' value."""
    try:
        while True:
            next(steps).Wait()
    except StopIteration as end:
        return end.value


class Source(Protocol):
    """A group's queue, or its mailbox."""

    def progress(self) -> None:
        """Drive its operations without waiting."""


lock = threading.RLock()
"""Of the pending operations of all groups."""
pending = 0
only_thread = 0
"""The thread that may communicate, where MPI takes no second one; 0: any."""
_active: dict[Source, None] = {}


def activate(source: Source) -> None:
    _active[source] = None


def deactivate(source: Source) -> None:
    _active.pop(source, None)


def poll() -> None:
    """Drive all that is pending in this process, without waiting."""
    lock.acquire()  # half the time of a with statement
    try:
        for source in tuple(_active):
            source.progress()
    finally:
        lock.release()


def finished() -> bool:
    """Poll; return True if nothing is pending."""
    poll()
    return pending == 0


def seconds(timeout: timedelta | float | None, *, of_group: bool = False) -> float | None:
    """Return a time limit, which every caller's ``timeout`` passes, in seconds; None: the default.

    TypeError if it is neither a timedelta nor a number; ValueError if no clock reaches it, or if it is 0 and that of a
    group. A wait with the limit 0 only looks.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, (timedelta, int, float)) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a datetime.timedelta or a number of seconds, got {type(timeout).__name__}")
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 <= limit_s < math.inf or (of_group and limit_s == 0):
        least = "above 0" if of_group else "of at least 0"
        raise ValueError(
            f"timeout must be a finite number of seconds {least}, got {timeout!r}; for a wait that may take as long as"
            " it wants pass a long one, such as datetime.timedelta(days=365)"
        )
    return limit_s


# Each poll before sleeping yields the core, which ranks may share.
_POLLS_BEFORE_SLEEP = 20_000
_SLEEP_S = 50e-6
_POLLS_BEFORE_YIELD = 50
"""Of a blocking receive: the time of a short message between two cores."""
_POLLS_PER_CHECK = 64


def poll_until(done: Callable[[], bool], operation: Operation, limit_s: float) -> bool:
    """Return False after ``limit_s``."""
    monitor = operation.members.monitor
    began = begin_wait(operation.as_limited())
    polls, deadline = 0, time.monotonic() + limit_s
    try:
        while not done():
            poll()
            polls += 1
            if polls > _POLLS_BEFORE_SLEEP:
                time.sleep(_SLEEP_S)
            elif not done():
                os.sched_yield()
            if polls % _POLLS_PER_CHECK == 0:
                monitor.check()
                if time.monotonic() > deadline:
                    return done()
        return True
    except Exception as error:
        monitor.translate(error)
        raise
    finally:
        end_wait(*began)


def matched_probe(comm: MPI.Intracomm, source: int, tag: int, status: MPI.Status) -> MPI.Message:
    """Wait for a message; MPI's own Mprobe spins through the time slice of a core that the sender may need."""
    polls = 0
    while (message := comm.Improbe(source, tag, status)) is None:
        polls += 1
        if polls > _POLLS_BEFORE_SLEEP:
            time.sleep(_SLEEP_S)
        elif polls > _POLLS_BEFORE_YIELD:
            os.sched_yield()
    return message


def begin_wait(operation: Operation) -> tuple[int, Operation | None]:
    """Show this thread's wait to the watchdog; return the arguments of `end_wait`."""
    me = get_ident()
    outer = waiting.get(me)
    waiting[me] = operation
    return me, outer


def end_wait(thread: int, outer: Operation | None) -> None:
    if outer is None:
        waiting.pop(thread, None)
    else:
        waiting[thread] = outer


def wait_for(done: Callable[[], bool], operation: Operation, timeout_s: float | None = None) -> None:
    """Poll until ``done()``; DistTimeoutError after ``timeout_s`` (the group's), other errors for faults of ranks."""
    members = operation.members
    limit_s = members.timeout_s if timeout_s is None else timeout_s
    if not poll_until(done, operation, limit_s):
        raise timed_out(operation, limit_s)


def timed_out(operation: Operation, limit_s: float) -> DistTimeoutError:
    """Name the ranks that keep the operation from ending, and let others see this wait meanwhile."""
    began = begin_wait(operation.as_limited())
    try:
        reason = operation.members.monitor.explain(operation)
    finally:
        end_wait(*began)
    return DistTimeoutError(f"{operation} did not finish in {limit_s:g} s (Timed out){reason}")


def run_in_thread(call: Callable[[], T], operation: Operation) -> T:
    """Run a blocking MPI call in a thread while this one keeps polling.

    Calls that make communicators have no other form, other ranks may have to finish what is pending first, and a failed
    rank would keep them from returning. Without MPI_THREAD_MULTIPLE, finish what is pending, and call.
    """
    monitor = operation.members.monitor
    threads = not only_thread
    if pending and not threads:
        wait_for(finished, operation)
    if not (threads and (pending or monitor.survivable)):
        began = begin_wait(operation)
        try:
            return call()
        except Exception as error:
            monitor.translate(error)
            raise
        finally:
            end_wait(*began)
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # surfaces in the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"mpiddp-{operation.name}", daemon=True).start()
    wait_for(outcome.done, operation)
    try:
        return outcome.result()
    except Exception as error:
        monitor.translate(error)
        raise
