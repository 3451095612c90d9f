"""Requests, pending operations, and the waits that drive them.

An algorithm is a generator that yields events with ``Test()`` and ``Wait()``, as MPI requests have. MPI makes progress
only inside its calls, and a generator only when it is resumed. Therefore a wait polls while operations are pending, and
`poll` drives all that is pending in the process.

Block inside MPI only when nothing is pending. Otherwise a program deadlocks if one rank waits for an asynchronous
operation before a blocking call and another rank after it; torch allows both.

Several threads may communicate, each in groups of its own. A thread holds `lock` while it drives pending operations,
but not while it waits.
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
from types import TracebackType
from typing import Any, Protocol, TypeVar

from mpiddp.errors import DistError, DistTimeoutError

from .operation import Operation, waiting

T = TypeVar("T")


class Awaited(Protocol):
    """An event, for which an algorithm waits: an MPI or CUDA request, several of these, or another condition."""

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        ...

    def Wait(self) -> Any:  # noqa: N802 - MPI's name
        polls = 0
        while not self.Test():
            polls += 1
            if polls > _LOOKS:
                pause(polls - _LOOKS)


Steps = Generator[Awaited, None, Any]


class When(Awaited):
    """An event that has happened once a condition is true."""

    __slots__ = ("_happened",)

    def __init__(self, happened: Callable[[], bool]) -> None:
        self._happened = happened

    def Test(self) -> bool:  # noqa: N802
        return self._happened()


READY, IN_TURN = When(lambda: True), When(lambda: True)
"""An operation yields one of these events first if all its steps have to run at the head of the queue. After `IN_TURN`
it still uses ``now``, so later operations have to wait for it (`Queue.delays`)."""


class All:
    """Several events as one. Callers list receives before sends.

    The events are tested one by one, because Open MPI ends the process if two requests of one Testall have failed.
    """

    __slots__ = ("requests",)

    def __init__(self, requests: list[Any]) -> None:
        self.requests = requests

    def Test(self) -> bool:  # noqa: N802
        for request in self.requests:  # noqa: SIM110 - half the time of all()
            if not request.Test():
                return False
        return True

    def Wait(self) -> None:  # noqa: N802
        for request in self.requests:
            request.Wait()


class Failed(Awaited):
    """An event that raises the error in which this rank's part of a call has ended."""

    def __init__(self, error: DistError) -> None:
        self._error = error

    def Test(self) -> bool:  # noqa: N802
        raise self._error


def interrupted() -> DistError:
    """Return the error that an operation raises at later waits and tests after a Ctrl-C has ended it."""
    return DistError("this call was interrupted, and its arrays are not complete")


class Driven:
    """The steps of a generator as one event.

    The generator is made at the first test. So no step runs while an asynchronous call is submitted.
    """

    __slots__ = ("_awaited", "_begin", "_ended", "_steps")

    def __init__(self, begin: Callable[[], Steps]) -> None:
        self._begin, self._ended = begin, False
        self._steps: Steps | None = None
        self._awaited: Awaited = READY

    def Test(self) -> bool:  # noqa: N802
        if self._steps is None:
            self._steps = self._begin()
        while not self._ended and self._awaited.Test():
            try:
                self._awaited = next(self._steps)
            except StopIteration:
                self._ended = True
            except BaseException:  # after a Ctrl-C the program may test the event again
                self._awaited = Failed(interrupted())
                raise
        return self._ended

    def Wait(self) -> None:  # noqa: N802
        while not self.Test():
            self._awaited.Wait()


def drive(steps: Steps) -> Any:
    """Run steps to their end, blocking in each wait, and return their value."""
    try:
        while True:
            next(steps).Wait()
    except StopIteration as end:
        return end.value


class Source(Protocol):
    """A group's queue or its mailbox, which have pending operations."""

    def progress(self) -> None:
        """Drive the operations as far as they get without waiting."""


lock = threading.RLock()
"""A thread holds this lock while it drives or changes pending operations of any group."""
pending = 0
"""The number of pending operations in this process."""
only_thread = 0
"""The only thread that may communicate, if MPI_THREAD_MULTIPLE is missing; 0 if any thread may."""
active: dict[Source, None] = {}
"""The sources that `poll` drives. A source stays among them until it has nothing pending."""


def poll() -> None:
    """Drive all that is pending in this process, without waiting."""
    lock.acquire()  # this takes half the time of a with statement
    try:
        for source in tuple(active):
            source.progress()
    finally:
        lock.release()


def finished() -> bool:
    """Poll; return True if nothing is pending."""
    poll()
    return pending == 0


def seconds(timeout: timedelta | float | None, *, of_group: bool = False) -> float | None:
    """Check a program's ``timeout`` and return it in seconds; None stays None, for the default.

    TypeError if it is neither a timedelta nor a number. ValueError if it is negative, infinite or NaN, or if it
    is 0 and the limit of a group. A wait with the limit 0 polls for about a millisecond.
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


_POLLS_BEFORE_SLEEP = 20_000
_SLEEP_S = 50e-6
_LOOKS = 50
"""How often a wait tests its event before it begins to yield the core. So many tests take about as long as a short
message between two cores."""
_CHECK_S = 1e-3
"""Time between two looks for faults of other ranks. A look takes as long as several polls."""


def pause(polls: int) -> None:
    """Yield the core to another rank, which may need it; after many polls sleep."""
    if polls > _POLLS_BEFORE_SLEEP:
        time.sleep(_SLEEP_S)
    else:
        os.sched_yield()


def poll_until(done: Callable[[], bool], operation: Operation, limit_s: float) -> bool:
    """Poll until ``done()`` is true; return False if it is not after ``limit_s`` seconds."""
    monitor, operation = operation.members.monitor, operation.as_limited()
    polls, began_s = 0, time.monotonic()
    checked_s = began_s
    with awaiting(operation):
        while not done():
            poll()
            polls += 1
            if not done():
                pause(polls)
            if time.monotonic() - checked_s > _CHECK_S:
                monitor.check()
                checked_s = time.monotonic()
                if checked_s - began_s > limit_s:
                    return done()
        return True


class awaiting:  # noqa: N801 - a statement's context
    """A wait of this thread, which the watchdog sees.

    An error becomes `RankFailedError` if a failed rank is its cause.
    """

    __slots__ = ("_operation", "_outer", "_thread")

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def __enter__(self) -> Operation:
        self._thread = thread = get_ident()
        self._outer = waiting.get(thread)
        waiting[thread] = operation = self._operation
        return operation

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if isinstance(error, Exception):
                self._operation.members.monitor.translate(error)
        finally:
            if self._outer is None:
                waiting.pop(self._thread, None)
            else:
                waiting[self._thread] = self._outer


def wait_for(done: Callable[[], bool], operation: Operation, timeout_s: float | None = None) -> None:
    """Poll until ``done()`` is true. DistTimeoutError after ``timeout_s``, by default the group's limit."""
    members, operation = operation.members, operation.as_limited()
    limit_s = members.timeout_s if timeout_s is None else timeout_s
    if not poll_until(done, operation, limit_s):
        error = timed_out(operation, limit_s)
        if timeout_s is None:
            members.monitor.timed_out(error)
        raise error


def timed_out(operation: Operation, limit_s: float) -> DistTimeoutError:
    """Return the error that names the ranks which keep a limited operation from ending.

    To ask those ranks takes a moment. Ranks that ask this one meanwhile still see its wait.
    """
    with awaiting(operation):
        reason = operation.members.monitor.explain(operation)
    return DistTimeoutError(f"{operation} did not finish in {limit_s:g} s (Timed out){reason}")


def run_in_thread(call: Callable[[], T], operation: Operation) -> T:
    """Run a blocking MPI call in another thread while this one keeps polling.

    MPI makes communicators by blocking calls. Such a call must not keep this rank from finishing pending operations
    that other ranks wait for, and a failed rank must not keep this thread waiting. If neither can happen, this thread
    makes the call itself. Without MPI_THREAD_MULTIPLE it does so after finishing what is pending.
    """
    threads = not only_thread
    if pending and not threads:
        wait_for(finished, operation)
    if not (threads and (pending or operation.members.monitor.polls)):
        with awaiting(operation):
            return call()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # the waiting thread raises it
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"mpiddp-{operation.call.name}", daemon=True).start()
    wait_for(outcome.done, operation)
    with awaiting(operation):
        return outcome.result()
