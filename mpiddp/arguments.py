"""Checks of arguments that several packages share. The module imports the standard library only."""

import operator


def whole(name: str, value: object, least: int | None = None) -> int:
    """Return ``value``, an integer of Python or NumPy, as an int.

    Anything else raises TypeError, and an integer below ``least`` raises ValueError.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} has to be an integer, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} has to be at least {least}, got {number}")
    return number
