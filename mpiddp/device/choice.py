"""The choice of the GPU that this process uses."""

import functools
import importlib.util
import sys

from .namespace import cupy

_FIRST_CUPY = 14
"""The first version of CuPy that has bfloat16."""
_index: int | None = None


@functools.cache
def cuda_fault() -> str | None:
    """Return the reason why CuPy cannot be used, or None. The first call imports CuPy, which takes a second."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'mpiddp[cuda12]' or 'mpiddp[cuda13]', whichever your driver has"
    try:
        if not cupy().is_available():
            return "CuPy finds no usable GPU: check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES"
        if int(cupy().__version__.split(".")[0]) < _FIRST_CUPY:
            return f"this is CuPy {cupy().__version__}, and mpiddp needs {_FIRST_CUPY} or later: upgrade it"
    except Exception as error:  # a broken installation of CUDA can raise any error
        return f"CuPy cannot be imported: {error}"
    return None


def device_count() -> int:
    """Return the number of visible GPUs."""
    if cuda_fault() is not None:
        return 0
    return int(cupy().cuda.runtime.getDeviceCount())


def set_device(index: int) -> None:
    """Choose GPU ``index`` for this process (``torch.cuda.set_device``). Without GPUs only remember the number.

    Examples
    --------
    >>> set_device(get_node_local_rank())  # doctest: +SKIP
    """
    global _index
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"set_device needs the number of a device, got {index!r}")
    count = device_count()
    if index < 0 or 0 < count <= index:
        raise ValueError(
            f"set_device({index}): this process sees {count} GPUs; use get_node_local_rank() % {max(count, 1)}"
        )
    if count:
        cupy().cuda.Device(index).use()
    _index = index


def current_device() -> int:
    """Return the number of the chosen device (``torch.cuda.current_device``).

    If none has been chosen by `set_device`, it is CuPy's current device, or 0 if CuPy is not in use.
    """
    if _index is None and in_use():
        return int(cupy().cuda.runtime.getDevice())
    return _index or 0


def choose(local_rank: int) -> None:
    """Choose a GPU by the rank's number on its node.

    Do nothing if CuPy is not in use, or if the program has already chosen or used a GPU.
    """
    if not in_use() or _index is not None:
        return
    if not cupy().cuda.runtime.getDevice() and not cupy().get_default_memory_pool().total_bytes():
        set_device(local_rank % device_count())


def in_use() -> bool:
    """Return True if CuPy has been imported and finds a GPU."""
    return "cupy" in sys.modules and cuda_fault() is None


def device_uuid() -> bytes:
    """Return a name of the current device, unique over nodes and containers.

    The name has both the UUID and the bus id. A bus id does not tell parts of a device apart, and CuPy cuts a UUID at
    its first zero byte.
    """
    runtime = cupy().cuda.runtime
    device = runtime.getDevice()
    uuid = bytes(runtime.getDeviceProperties(device)["uuid"])[:16]
    return uuid.ljust(16, b"\0") + str(runtime.deviceGetPCIBusId(device)).encode()
