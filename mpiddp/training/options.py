"""What an option of a command line is, and the errors of a request; imports the standard library only."""

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class UsageError(Exception):
    """A request that cannot be fulfilled; rank 0 alone prints its text, one line."""

    exit_code = 2


class RunError(UsageError):
    """A failure of a run that all ranks know of and that needs no traceback."""

    exit_code = 1


@contextlib.contextmanager
def refusing(
    prefix: str, *kinds: type[Exception], by: type[UsageError] = UsageError, after: str = ""
) -> Iterator[None]:
    """Raise an error of the block as a `UsageError`, with a prefix before its text and more after it."""
    try:
        yield
    except kinds as error:
        raise by(f"{prefix}{error}{after}") from error


class Range(NamedTuple):
    expected: str
    """The words after "has to be" in an error."""
    holds: Callable[[Any], bool]


AT_LEAST_0 = Range("at least 0", lambda value: 0 <= value < math.inf)
AT_LEAST_1 = Range("at least 1", lambda value: 1 <= value < math.inf)
POSITIVE = Range("positive", lambda value: 0 < value < math.inf)
SHARE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)


def option(
    default: Any,
    text: str,
    *choices: str,
    metavar: str | None = None,
    within: Range | None = None,
    begins: str = "",
) -> Any:
    """Make a dataclass field an option; ``begins`` names the group of ``--help`` whose first one it is."""
    metadata = {"begins": begins, "help": text, "choices": choices, "metavar": metavar, "within": within}
    return dataclasses.field(default=default, metadata=metadata)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` if a known name is near; else "".

    >>> nearest("epoch", ["lr", "epochs"])
    '; did you mean epochs?'
    """
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
