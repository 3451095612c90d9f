"""mpiddp's errors as subclasses of torch's, so that a program can catch them by either name."""

import contextlib
from collections.abc import Iterator

from torch.distributed import DistBackendError

from mpiddp import errors


class BackendError(DistBackendError, errors.DistError):
    """An operation, or the whole job, has failed (``torch.distributed.DistBackendError``)."""


class MismatchError(BackendError, errors.MismatchError):
    """Ranks disagree about a collective."""


class TimeoutError(BackendError, errors.DistTimeoutError):
    """An operation did not finish in time."""


class RankFailedError(BackendError, errors.RankFailedError):
    """Ranks have failed; their numbers are in ``ranks``."""


class ArgumentError(RuntimeError, ValueError, TypeError):
    """An argument is wrong. torch's backends raise RuntimeError then, and mpiddp's functions ValueError or TypeError.

    The class derives from all three, so that a program can catch any of them.
    """


def expect(right: bool, text: str) -> None:
    if not right:
        raise ArgumentError(text)


RAISED = (errors.DistError, ValueError, TypeError)
"""The errors that mpiddp's functions raise."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except RAISED as error:
        raise translate(error) from error


def translate(error: Exception) -> Exception:
    """Return the error to raise in torch for an error of mpiddp, with its text.

    The text of a timeout gets torch's words in front. `ArrayError`, errors that are torch's already, and those that
    mpiddp does not raise are returned unchanged.
    """
    if not isinstance(error, RAISED) or isinstance(error, DistBackendError | errors.ArrayError | ArgumentError):
        return error
    if not isinstance(error, errors.DistError):
        return ArgumentError(str(error))
    if isinstance(error, errors.RankFailedError):
        return RankFailedError(str(error), error.ranks)
    if isinstance(error, errors.DistTimeoutError):
        return TimeoutError(f"mpiddp: Timed out waiting: {error}")  # programs look for torch's words "Timed out"
    if isinstance(error, errors.MismatchError):
        return MismatchError(str(error), error.ranks)
    return BackendError(str(error))
