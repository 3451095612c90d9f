"""Futures, as in ``torch.futures``. The program sets a future's value, or a `Work` does when it ends."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .requests import poll

_PAUSE_S = 50e-6


class Future:
    """A value that will be there later (``torch.futures.Future``).

    Examples
    --------
    >>> future = Future()
    >>> twice = future.then(lambda found: 2 * found.value())
    >>> future.set_result(3)
    >>> twice.wait()
    6
    """

    __slots__ = ("_callbacks", "_error", "_finished", "_help", "_lock", "_value")

    def __init__(self, *, devices: object = None) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._finished = False
        self._callbacks: list[Callable[[Future], object]] = []
        self._lock = threading.Lock()
        self._help: Callable[[], object] = poll

    def _is_finished(self) -> bool:
        return self._finished

    def done(self) -> bool:
        """Return True if the value, or an error, is set."""
        if not self._is_finished():
            poll()
        return self._is_finished()

    def wait(self) -> Any:
        """Wait for the value and return it, or raise the error."""
        while not self._finished:
            try:
                self._help()
            except BaseException:
                if not self._finished:
                    raise
            if not self._finished:
                time.sleep(_PAUSE_S)
        if self._error is not None:
            raise self._error
        return self._value

    def value(self) -> Any:
        """Return the value, or raise the error; RuntimeError if there is neither yet."""
        if not self._is_finished():
            raise RuntimeError("the value of this future is not there yet; call wait()")
        return self.wait()

    def set_result(self, result: Any) -> None:
        """Set the value, and call the callbacks; RuntimeError if there is a value or an error already."""
        self._finish(result, None)

    def set_exception(self, result: BaseException) -> None:
        """Set an error, and call the callbacks.

        AssertionError if ``result`` is no exception. RuntimeError if there is a value or an error already.
        """
        if not isinstance(result, BaseException):
            raise AssertionError(f"{result!r} is of type {type(result).__name__}, not an Exception.")
        self._finish(None, result)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._finished:
                raise RuntimeError("Future can only be marked completed once, and this one has its value or error")
            self._value, self._error, self._finished = value, error, True
            callbacks, self._callbacks = self._callbacks, []
        call_all([functools.partial(call_logged, callback, self) for callback in callbacks])

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call ``callback(self)`` when the value or error is set, or at once if it is set already.

        An exception in the callback is logged.
        """
        with self._lock:
            if not self._finished:
                self._callbacks.append(callback)
                return
        call_logged(callback, self)

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future of what ``callback(self)`` returns or raises."""
        outcome = Future()
        outcome._help = self.wait

        def run(future: Future) -> None:
            try:
                result = callback(future)
            except BaseException as error:  # `wait` of the new future raises it
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        self.add_done_callback(run)
        return outcome


def call_all(callbacks: Sequence[Callable[[], object]]) -> None:
    """Call all ``callbacks``, even after one has raised; then raise the first error."""
    first: BaseException | None = None
    for callback in callbacks:
        try:
            callback()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def call_logged(callback: Callable[[Future], object], future: Future) -> None:
    try:
        callback(future)
    except Exception:
        logging.getLogger("mpiddp").exception("a callback of a future has failed")


def collect_all(futures: Sequence[Future]) -> Future:
    """Return a future whose value is the list ``futures``. It is set when all of them have a value or an error.

    Examples
    --------
    >>> one, two = Future(), Future()
    >>> both = collect_all([one, two])
    >>> one.set_result(1), two.set_result(2)
    (None, None)
    >>> [each.value() for each in both.wait()]
    [1, 2]
    """
    outcome = Future()
    left = itertools.count(len(futures) - 1, -1)

    def wait_for_each() -> None:
        for each in futures:
            try:
                each.wait()
            except Exception:
                if not each.done():  # otherwise it is that future's own error, which its `value` raises
                    raise

    def count(_: Future) -> None:
        if next(left) == 0:  # several threads may count, because `next` holds Python's lock
            outcome.set_result(list(futures))

    outcome._help = wait_for_each
    if not futures:
        outcome.set_result([])
    for each in futures:
        each.add_done_callback(count)
    return outcome


def wait_all(futures: Sequence[Future]) -> list[Any]:
    """Wait for all ``futures``; return their values, or raise the first error.

    Examples
    --------
    >>> future = Future()
    >>> future.set_result(3)
    >>> wait_all([future])
    [3]
    """
    return [each.wait() for each in collect_all(futures).wait()]
