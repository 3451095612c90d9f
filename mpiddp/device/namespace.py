"""The array namespace (``xp``): the module whose functions work on an array.

CuPy is looked up in ``sys.modules``: an array of it cannot exist before somebody has imported it, so a process that
works on the host never pays for the import (as array-api-compat does it).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from mpiddp.typing import Array


def is_device_array(x: object) -> bool:
    """Tell whether ``x`` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def array_namespace(x: object) -> Any:
    """Return the module, ``numpy`` or ``cupy``, whose functions work on ``x``."""
    return sys.modules["cupy"] if is_device_array(x) else np


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an uninitialised array on the current device."""
    made: Array = importlib.import_module("cupy").empty(shape, dtype)
    return made
