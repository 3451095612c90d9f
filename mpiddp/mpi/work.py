"""Operations on their way: a `Work` drives a generator that yields what it waits for.

An algorithm is written once, as steps::

    def all_reduce(link, x, op):
        yield link.now.Iallreduce(MPI.IN_PLACE, x, op)

What it yields answers ``Test()`` and ``Wait()``, as MPI requests do. What stands before the first ``yield`` runs when
the operation is submitted and uses communicators named ``now``; every later step runs when it is at the head of
its group's queue and uses those named ``later``. So on each communicator all ranks issue their calls in one order,
whichever way their programs wait; without it, steps overtake each other and sums come out wrong, silently.

MPI makes progress only inside MPI calls, and steps only when somebody drives them, so every wait polls. A blocking
operation may bypass all this only while nothing is on its way (`unfinished` is zero): otherwise a program that is legal
in torch, where one rank waits before a small blocking call and another after it, would never end.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from mpiddp.errors import DistTimeoutError

from . import operation
from .future import Future, Promised
from .lazy import MPI
from .operation import Operation
from .requests import All as All
from .requests import Awaited as Awaited
from .requests import Each as Each
from .requests import Steps as Steps
from .requests import activate as activate
from .requests import deactivate as deactivate
from .requests import drive as drive
from .requests import poll as poll

if TYPE_CHECKING:
    # The exception hook is installed before NumPy may be imported, and asks here whether anything is on its way.
    from mpiddp.typing import Array

T = TypeVar("T")
_new_tuple = tuple.__new__


unfinished = 0
"""Operations of this process, in all groups, that have been submitted and are not finished."""

_given_up: list[tuple[Steps, Awaited | None]] = []
"""Operations that will never end, whose requests and memory MPI still has."""


def finished() -> bool:
    """Poll, and tell whether nothing is on its way any more."""
    poll()
    return unfinished == 0


def seconds(timeout: timedelta | float | None) -> float | None:
    """Return a timeout in seconds.

    Raises
    ------
    TypeError
        If it is neither a `datetime.timedelta` nor a number of seconds.
    """
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        return float(timeout)
    raise TypeError(f"timeout must be a datetime.timedelta or a number of seconds, got {type(timeout).__name__}")


# A waiting rank gives its core away at once, because ranks may share cores; after this many polls it also sleeps.
_POLLS_BEFORE_SLEEP = 20_000
_SLEEP_S = 50e-6


def poll_until(done: Callable[[], bool], waiting: Operation, limit_s: float) -> bool:
    """Poll until ``done()``, and tell whether that came within ``limit_s`` seconds."""
    limited = _new_tuple(Operation, (*waiting[:4], True, waiting.number))  # _replace takes five times as long
    outer, operation.running = operation.running, limited
    polls, deadline = 0, time.monotonic() + limit_s
    try:
        while not done():
            poll()
            polls += 1
            if polls > _POLLS_BEFORE_SLEEP:
                time.sleep(_SLEEP_S)
            else:
                os.sched_yield()
            if polls % 64 == 0:
                waiting.link.world.deaths.look()
                waiting.link.look()
                if time.monotonic() > deadline:
                    return done()
        return True
    except Exception as error:
        waiting.link.world.deaths.meet(error)
        raise
    finally:
        operation.running = outer


def wait_for(done: Callable[[], bool], waiting: Operation, timeout_s: float | None = None) -> None:
    """Poll until ``done()``.

    Raises
    ------
    DistTimeoutError
        If that takes longer than ``timeout_s`` seconds (default: the group's timeout).
    MismatchError
        If ranks are found to wait in different operations.
    """
    limit_s = waiting.link.timeout_s if timeout_s is None else timeout_s
    if not poll_until(done, waiting, limit_s):
        reason = waiting.link.world.presence.explain(waiting)
        raise DistTimeoutError(f"{waiting} did not finish in {limit_s:g} s (Timed out): {reason}")


def aside(call: Callable[[], T], what: Operation) -> T:
    """Return what a call that blocks in MPI returns, and let everything that is on its way go on meanwhile.

    MPI has no non-blocking form of what makes communicators. So the call runs in a thread when something is on its
    way: other ranks may have to finish that before they come to their call. And where ranks may die: it may never end.
    """
    deaths = what.link.world.deaths
    if not (unfinished or deaths.survivable) or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        outer, operation.running = operation.running, what
        try:
            return call()
        except Exception as error:
            deaths.meet(error)
            raise
        finally:
            operation.running = outer
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # surfaces in the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"mpiddp-{what.name}", daemon=True).start()
    wait_for(outcome.done, what)
    try:
        return outcome.result()
    except Exception as error:
        deaths.meet(error)
        raise


class Work:
    """An operation on its way (``torch.distributed.Work``).

    Parameters
    ----------
    steps : generator
        What the operation does; started here.
    what : Operation
        What it is called.
    outputs : list of arrays
        The arrays that hold its result when it has finished.
    """

    __slots__ = (
        "_awaited",
        "_callbacks",
        "_check",
        "_error",
        "_finished",
        "_limit_s",
        "_outputs",
        "_received",
        "_steps",
        "_what",
        "value",
    )

    def __init__(self, steps: Steps, what: Operation, outputs: list[Array]) -> None:
        global unfinished
        self._what = what
        self._outputs = outputs
        self._steps = steps
        self._awaited: Awaited | None = None
        self._error: BaseException | None = None
        self._finished = False
        self._check: Callable[[], None] | None = None
        self._limit_s: float | None = None
        self._received: Callable[[], tuple[int, int]] | None = None
        self.value: Any = None
        """What the steps returned, for operations that make their results."""
        self._callbacks: list[Callable[[], None]] = []
        unfinished += 1
        self._resume()

    def _resume(self) -> None:
        """Run the next step, until it waits again."""
        try:
            self._awaited = next(self._steps)
        except StopIteration as end:
            self.value = end.value
            self._finish(None)
        except BaseException as error:  # surfaces in wait()
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        global unfinished
        unfinished -= 1
        self._error, self._finished, self._awaited = error, True, None

    def announce(self) -> None:
        """Call what waits for the end; by the one who drives it, when it stands in nobody's way any more."""
        callbacks, self._callbacks = self._callbacks, []
        if callbacks:
            self._check = None  # they may change the arrays
        for callback in callbacks:
            callback()

    def advance(self) -> bool:
        """Run the steps that need not wait, and tell whether the operation has finished."""
        while not self._finished:
            assert self._awaited is not None
            try:
                ready = self._awaited.Test()
            except BaseException as error:
                self._finish(error)
                break
            if not ready:
                return False
            self._resume()
        return True

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the operation has finished.

        Parameters
        ----------
        timeout : timedelta or float, optional
            Seconds that this call may take; default: what the operation was given, or the group's timeout.

        Returns
        -------
        bool
            True.

        Raises
        ------
        DistTimeoutError
            If it takes longer.
        Exception
            What went wrong in the operation.
        """
        if not self._finished:
            poll()
        if not self._finished:
            wait_for(self._is_finished, self._what, self._limit_s if timeout is None else seconds(timeout))
        if self._error is not None:
            self._what.link.world.deaths.meet(self._error)
            raise self._error
        if self._check is not None:
            self._hand_over()
        return True

    def _is_finished(self) -> bool:
        return self._finished

    def limit(self, timeout_s: float | None) -> None:
        """Let `wait` take this long by default.

        Parameters
        ----------
        timeout_s : float or None
            Seconds; None: the group's timeout.
        """
        self._limit_s = timeout_s

    def verify(self, check: Callable[[], None]) -> None:
        """Have the result looked at when the program first hears that the operation has finished.

        Parameters
        ----------
        check : callable
            Called once, without arguments; what it raises surfaces in `wait` or `is_completed`.
        """
        self._check = check

    def _hand_over(self) -> None:
        check, self._check = self._check, None
        if check is not None:
            check()

    def abandon(self) -> None:
        """Finish an operation that will never be: its driver has given it up."""
        self._steps.close()
        self._finish(None)

    def is_running(self) -> bool:
        """Tell whether one of the steps is being run now, somewhere up the stack."""
        return inspect.getgeneratorstate(self._steps) == inspect.GEN_RUNNING

    def fail(self, error: BaseException) -> None:
        """Finish an operation that will never be, with an error; MPI may still write to its memory, which is kept."""
        if not self._finished:
            _given_up.append((self._steps, self._awaited))
            self._finish(error)

    def is_completed(self) -> bool:
        """Tell whether the operation has finished, and help it on."""
        if not self._finished:
            poll()
        if self._finished and self._check is not None:
            self._hand_over()
        return self._finished

    def is_success(self) -> bool:
        """Tell whether the operation has finished without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None."""
        return self._error

    def result(self) -> list[Array]:
        """Return the arrays that hold the result; they are complete after `wait`."""
        return self._outputs

    def describe(self, received: Callable[[], tuple[int, int]]) -> None:
        """Say how to find out what a receive has received.

        Parameters
        ----------
        received : callable
            Returns the sender, a global rank, and the number of elements; called after the end only.
        """
        self._received = received

    def _receipt(self) -> tuple[int, int]:
        if self._received is None or not self._finished:
            raise RuntimeError("this is known for a receive that has finished; call wait() first")
        return self._received()

    def source_rank(self) -> int:
        """Return the global rank that a receive has received from; RuntimeError before that, and for others."""
        return self._receipt()[0]

    def count(self) -> int:
        """Return the number of elements that a receive has received, which may be fewer than its array has."""
        return self._receipt()[1]

    def synchronize(self) -> None:
        """Do what `wait` does, where no stream has to be told."""
        self.wait()

    def get_future(self) -> Future:
        """Return a `Future` of the list of arrays that hold the result."""
        return Promised(self.wait, self._is_finished, self._then, lambda: self._outputs)

    def _then(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the operation has finished."""
        if self._finished:
            callback()
        else:
            self._callbacks.append(callback)


class Queue:
    """The operations of a group that are on their way, in the order in which all its ranks submitted them."""

    __slots__ = ("_works",)

    def __init__(self) -> None:
        self._works: deque[Work] = deque()

    def __len__(self) -> int:
        return len(self._works)

    def submit(self, steps: Steps, what: Operation, outputs: list[Array]) -> Work:
        """Start ``steps`` up to their first wait and queue the rest."""
        work = Work(steps, what, outputs)
        self._works.append(work)
        activate(self)
        return work

    def fail(self, error: BaseException) -> None:
        """End everything that is on its way with an error, but for what has raised it and ends by itself."""
        given_up = [work for work in self._works if not work.is_running()]
        self._works = deque(work for work in self._works if work.is_running())
        for work in given_up:
            work.fail(error)
            work.announce()

    def progress(self) -> None:
        """Drive the head of the queue, and what follows when it has finished."""
        while self._works and self._works[0].advance():
            # A callback may submit an operation and wait for it, which comes here again.
            self._works.popleft().announce()
        if not self._works:
            deactivate(self)
