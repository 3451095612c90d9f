"""Options of a command line as dataclass fields, and the errors of a request. Only the standard library is imported."""

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class UsageError(Exception):
    """A request that cannot be fulfilled. The command prints the text as one line, on rank 0 only."""

    exit_code = 2


class RunError(UsageError):
    """A failure of a run that all ranks know of and that needs no traceback."""

    exit_code = 1


@contextlib.contextmanager
def refusing(
    prefix: str, *kinds: type[Exception], by: type[UsageError] = UsageError, after: str = ""
) -> Iterator[None]:
    """Turn an error of the block into a `UsageError` (or ``by``) with the text prefix + error + ``after``.

    Only errors of the given ``kinds`` are turned.
    """
    try:
        yield
    except kinds as error:
        raise by(f"{prefix}{error}{after}") from error


class Range(NamedTuple):
    expected: str
    """The words that follow "has to be" in the message of an error, such as "at least 1"."""
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
    """Return a dataclass field with an option's description.

    ``begins`` is the title of a group in ``--help`` if the option is the first of that group, else "".
    """
    metadata = {"begins": begins, "help": text, "choices": choices, "metavar": metavar, "within": within}
    return dataclasses.field(default=default, metadata=metadata)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` if ``name`` resembles a known name X; else "".

    >>> nearest("epoch", ["lr", "epochs"])
    '; did you mean epochs?'
    """
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
