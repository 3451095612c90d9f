"""Where arrays live: NumPy or CuPy, found without importing either when it is not in use.

The only package that imports cupy. It may import ``errors``, ``settings`` and ``typing``.
"""

from .namespace import array_namespace, is_device_array

__all__ = ["array_namespace", "is_device_array"]
