"""Pending operations: a `Work` drives a generator that yields what it waits for.

An algorithm is written once, as steps that serve blocking and asynchronous calls::

    def all_reduce(link, x, op):
        yield link.now.Iallreduce(MPI.IN_PLACE, x, op)

An operation runs to its first ``yield`` when it is submitted, using the communicator ``now``. Its later steps run when
it reaches the head of the group's queue, using ``later``. So every rank issues its calls on each communicator in the
same order, wherever its program waits. Otherwise steps of two operations could overtake each other, and sums would be
wrong.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from . import requests
from .future import Future, call_all, call_logged
from .lazy import MPI
from .operation import Operation
from .requests import IN_TURN, Awaited, Steps, active, interrupted, poll, seconds, wait_for

if TYPE_CHECKING:
    # Only type checkers need this, and the import would load NumPy.
    from mpiddp.typing import Array

_abandoned: list[tuple[object, ...]] = []
"""Operations that were given up. They are kept, because MPI may still write to their memory."""


def abandon(steps: Steps | Awaited, error: BaseException) -> None:
    """Keep the memory of steps that ``error`` has ended, because MPI may still write to it for requests in flight."""
    assert error.__traceback__ is not None, "it has been raised"
    _abandoned.append(
        (steps, error.__traceback__.tb_next)
    )  # the caller's frame is left out, because it holds the program's data


_POLLS = 20
_LOOK_S = 0.05
"""Time between two looks for faults of other ranks, in a program that polls."""
_RECEIVE_ONLY = "this is known for a receive that has finished; call wait() first"


class Work:
    """A pending operation (``torch.distributed.Work``). Its arrays must stay as they are until `wait` has returned.

    Collectives of a group that take the same array are carried out in the order of their calls. The exceptions are
    calls that copy the array at once: ``reduce_scatter`` of a list, ``tree_all_reduce``, and calls with torch's tensors
    that are not contiguous. After an operation on an array, these calls, messages, and operations of another group may
    take the array only when `wait` of that operation has returned.

    Examples
    --------
    >>> x = np.ones(3)
    >>> work = dist.all_reduce(x, async_op=True)
    >>> work.wait(timeout=10), work.is_success()
    (True, True)
    """

    # These defaults are the class's, because a short message has to be made quickly and sets only what it needs.
    _steps: Steps | None = None
    _awaited: Awaited | None = None
    _error: BaseException | None = None
    _finished = False
    _limit_s: float | None = None
    _callbacks: tuple[Callable[[], None], ...] = ()
    _value: Any = None
    _looked = 0.0
    _spans: Sequence[tuple[int, int]] = ()
    """For each array of the call, its first address, and the address behind its last byte."""

    def __init__(self, steps: Steps, operation: Operation, outputs: Sequence[Array]) -> None:
        self._operation = operation
        self._outputs = outputs
        self._steps = steps
        requests.pending += 1
        self._resume(steps)

    def _resume(self, steps: Steps) -> None:
        try:
            self._awaited = next(steps)
        except StopIteration as end:
            self._value = end.value
            self._finish(self._error)
        except Exception as error:  # `wait` raises it
            self._error = error  # it is set before `_finish`, because a Ctrl-C may come now
            if isinstance(error, MPI.Exception):
                abandon(steps, error)
            self._finish(error)
        except BaseException as error:
            # A Ctrl-C is raised at once, not by wait(). Other ranks go on.
            abandon(steps, error)
            self._finish(interrupted())
            raise

    def _finish(self, error: BaseException | None) -> None:
        requests.pending -= 1
        self._error, self._finished, self._awaited = error, True, None
        if error is None:
            self._operation.end = monotonic()

    def _announce(self) -> None:
        """Call all callbacks, even after one has raised."""
        callbacks, self._callbacks = self._callbacks, ()
        if callbacks:
            call_all(callbacks)

    def _advance(self) -> bool:
        """Run the steps as far as they get without waiting; return True if the operation has ended."""
        while not self._finished:
            assert self._awaited is not None
            try:
                ready = self._awaited.Test()
            except Exception as error:
                self._fail(error)
                break
            if not ready:
                return False
            if self._steps is None:
                self._finish(None)
            else:
                self._resume(self._steps)
        return True

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the operation has ended; return True, or raise its error.

        Parameters
        ----------
        timeout : timedelta or float, optional
            The limit in seconds, after which it raises `DistTimeoutError`. The default is the limit of the operation
            if it has one, else that of the group.
        """
        limit_s = self._limit_s if timeout is None else seconds(timeout)
        if not self._finished:
            poll()
            for _ in range(_POLLS):  # a short operation ends before `wait_for` would be set up
                if self._finished:
                    break
                os.sched_yield()
                poll()
            else:
                wait_for(self._is_finished, self._operation, limit_s)
        if self._error is not None:
            self._operation.call.members.monitor.translate(self._error)
            raise self._error
        return True

    def _is_finished(self) -> bool:
        return self._finished

    def _is_running(self) -> bool:
        """Return True if this is called from one of the operation's steps."""
        return self._steps is not None and inspect.getgeneratorstate(self._steps) == inspect.GEN_RUNNING

    def _fail(self, error: BaseException) -> None:
        """End the operation with ``error``; keep its arrays alive, because MPI may still write to them."""
        if not self._finished:
            _abandoned.append((self._steps, self._awaited, self._outputs))
            self._finish(error)

    def is_completed(self) -> bool:
        """Let pending operations make progress; return True if this one has ended, also by an error."""
        if not self._finished:
            poll()
            self._look_for_faults()
        return self._finished

    def _look_for_faults(self) -> None:
        """End the operation with an error if ranks have failed or make other calls, for programs that never wait."""
        now = monotonic()
        if self._finished or now - max(self._operation.start, self._looked) < _LOOK_S:
            return
        self._looked = now
        try:
            self._operation.members.monitor.check()
        except Exception as error:
            with requests.lock:  # another thread may be driving this operation
                self._fail(error)

    def is_success(self) -> bool:
        """Return True if the operation has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None."""
        return self._error

    def result(self) -> list[Array]:
        """Return the arrays of the result, which are complete after `wait`."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """Return the global rank of the sender, for a receive that has ended; else RuntimeError."""
        raise RuntimeError(_RECEIVE_ONLY)

    def count(self) -> int:
        """Return how many elements have come, for a receive that has ended; else RuntimeError."""
        raise RuntimeError(_RECEIVE_ONLY)

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def get_future(self) -> Future:
        """Return a `Future` of the arrays of the result."""
        return _Promised(self)

    def _then(self, callback: Callable[[], None]) -> None:
        with requests.lock:
            if not self._finished:
                self._callbacks += (callback,)
                return
        callback()


class Ended(Work):
    """An operation that ended when it was submitted."""

    _finished = True

    def __init__(self, outputs: Sequence[Array]) -> None:
        self._outputs = outputs

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if timeout is not None:
            seconds(timeout)  # it raises if the timeout is not valid
        return True


def meet(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    """Return True if a span of memory in ``some`` overlaps one in ``others``."""
    end, side = 0, False
    for start, stop, other in sorted([*((*each, False) for each in some), *((*each, True) for each in others)]):
        if start < end and other is not side:
            return True
        if stop > end:
            end, side = stop, other
    return False


class _Promised(Future):
    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def _is_finished(self) -> bool:
        return self._work._finished

    def wait(self) -> Any:
        self._work.wait()
        return self._work.result()

    def _finish(self, value: Any, error: BaseException | None) -> None:
        raise RuntimeError("this future belongs to an operation, which alone gives it its value")

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        self._work._then(lambda: call_logged(callback, self))


class Queue:
    """The pending collectives of a group, in the same order on all ranks."""

    __slots__ = ("_works",)

    def __init__(self) -> None:
        self._works: deque[Work] = deque()

    def __len__(self) -> int:
        return len(self._works)

    def submit(
        self, steps: Steps, operation: Operation, outputs: Sequence[Array], spans: Sequence[tuple[int, int]] = ()
    ) -> Work:
        """Run ``steps`` to their first wait, and queue the rest. The caller holds `requests.lock`."""
        work = Work(steps, operation, outputs)
        work._spans = spans
        if self._works or not work._finished:
            self._works.append(work)
            active[self] = None
        return work

    def operations(self) -> list[Operation]:
        """Return the pending operations, first the one at the head. Any thread may ask."""
        return [work._operation for work in list(self._works)]

    def delays(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Return True if an operation on this memory must not begin before its turn.

        That is so if an earlier operation uses the same memory. It is also so if an earlier one has not begun itself,
        because all ranks must use a communicator in the same order.
        """
        return any(work._awaited is IN_TURN or meet(spans, work._spans) for work in self._works)

    def fail(self, error: BaseException) -> None:
        """End all operations with ``error``, except one whose step is raising it."""
        with requests.lock:
            failed = [work for work in self._works if not work._is_running()]
            self._works = deque(work for work in self._works if work._is_running())
            for work in failed:
                work._fail(error)
                work._announce()

    def progress(self) -> None:
        """Drive the operation at the head, and the next ones when it has ended."""
        while self._works and self._works[0]._advance():
            # A callback may submit an operation and wait for it, which calls `progress` again.
            self._works.popleft()._announce()
        if not self._works:
            active.pop(self, None)
