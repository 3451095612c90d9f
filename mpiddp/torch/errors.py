"""mpiddp's errors as torch's, so that a program can catch them by either name."""

import contextlib
from collections.abc import Iterator

from torch.distributed import DistBackendError

from mpiddp import errors


class BackendError(DistBackendError, errors.DistError):
    """An error of the job (``torch.distributed.DistBackendError``)."""


class MismatchError(BackendError, errors.MismatchError):
    """Ranks disagree about a collective."""


class TimeoutError(BackendError, errors.DistTimeoutError):
    """An operation did not finish in time."""


class RankFailedError(BackendError, errors.RankFailedError):
    """Ranks have failed; their numbers are in ``ranks``."""


class ArgumentError(RuntimeError, ValueError, TypeError):
    """A wrong argument: torch's backends raise RuntimeError, mpiddp's functions one of the others."""


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
    """Return an error of mpiddp as one of torch, with the same text; `ArrayError` and errors of others as they are."""
    if not isinstance(error, RAISED) or isinstance(error, DistBackendError | errors.ArrayError | ArgumentError):
        return error
    if not isinstance(error, errors.DistError):
        return ArgumentError(str(error))
    if isinstance(error, errors.RankFailedError):
        return RankFailedError(str(error), error.ranks)
    if isinstance(error, errors.DistTimeoutError):
        return TimeoutError(f"mpiddp: Timed out waiting: {error}")  # programs look for torch's two words
    if isinstance(error, errors.MismatchError):
        return MismatchError(str(error))
    return BackendError(str(error))
