"""Where arrays live: NumPy or CuPy, found without importing either when it is not in use.

The only package that imports cupy. It may import ``errors``, ``settings`` and ``typing``.
"""

from .choice import cuda_fault, current_device, device_count, set_device
from .namespace import array_namespace, is_device_array

__all__ = ["array_namespace", "cuda_fault", "current_device", "device_count", "is_device_array", "set_device"]
