"""The fields of a sample, as their dtype and as the text in which sources describe them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_FIELD = re.compile(r"\s*(\w+)\s+(bool|[a-z]+\d+)((?:\s+\d+)*)\s*")


def parsed(text: str) -> np.dtype[Any]:
    fields: list[tuple[str, str, tuple[int, ...]]] = []
    for part in text.strip().rstrip(";").split(";"):
        match = _FIELD.fullmatch(part)
        if match is None or match[2] not in np.sctypeDict:
            raise ValueError(
                "a field is a name, a dtype of NumPy and dimensions, as in 'x float32 64 64; step int64' (send numbers "
                f"that NumPy does not have as integers of their size); got {part!r}"
            )
        fields.append((match[1], match[2], tuple(map(int, match[3].split()))))
    return np.dtype(fields)


def text_of(dtype: np.dtype[Any]) -> str:
    """Return a structured dtype as sources write it.

    Examples
    --------
    >>> text_of(np.dtype([("x", "f4", (2, 3)), ("step", "i8")]))
    'x float32 2 3; step int64'
    """
    of = [(name, dtype[name].base.name, *dtype[name].shape) for name in dtype.names or ()]
    return "; ".join(" ".join(map(str, each)) for each in of)
