"""CuPy's ``lib``."""

from typing import Any

import numpy as np

from ._array import ndarray


class stride_tricks:  # noqa: N801 - CuPy's name
    """Views by strides."""

    @staticmethod
    def as_strided(x: ndarray, shape: Any, strides: Any) -> ndarray:
        """Return a view of a shape with strides in bytes."""
        return x._view(np.lib.stride_tricks.as_strided(x._host, shape, strides))
