"""Whether operations are recorded: a switch for each thread.

Imports nothing of mpiddp.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


class _Mode(threading.local):
    """The switch; every thread starts with recording on."""

    enabled = True


mode = _Mode()


class _SetGradEnabled:
    """Context manager and decorator that sets the switch and puts it back."""

    value: bool

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(mode.enabled)
        mode.enabled = self.value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mode.enabled = self._before.pop()

    def __call__(self, function: _Callable) -> _Callable:
        """Wrap ``function`` so that its body runs under the switch."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with type(self)():
                return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


class no_grad(_SetGradEnabled):  # noqa: N801 (torch's name)
    """Record nothing in this block, or in this function, of this thread.

    Examples
    --------
    >>> from mpiddp.autograd import Tensor, no_grad
    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> with no_grad():
    ...     y = x * 2
    >>> y.requires_grad
    False
    """

    value = False


class enable_grad(_SetGradEnabled):  # noqa: N801 (torch's name)
    """Record again inside of a :class:`no_grad` block."""

    value = True


def is_grad_enabled() -> bool:
    """Tell whether operations of this thread are recorded."""
    return mode.enabled
