"""Checks of arguments that several parts share. Imports the standard library only."""

import operator


def whole(name: str, value: object, least: int | None = None) -> int:
    """Return an integer, also NumPy's, as an int; TypeError for other numbers, ValueError if it is below ``least``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} has to be an integer, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} has to be at least {least}, got {number}")
    return number
