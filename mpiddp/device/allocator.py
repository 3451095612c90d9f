"""The C library's allocator, as far as large arrays are concerned. Imports nothing of mpiddp."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_KEEP_BELOW_BYTES = 1 << 30


def tune_allocator() -> bool:
    """Let the process keep the memory of arrays that it frees, for the next ones.

    glibc gets every array of more than 128 KiB (a limit that grows to 32 MiB on its own) from the kernel and gives it
    back when it is freed, and gives the end of the heap back too. A training step frees what the next one asks for
    again, and each time every page is mapped, faulted in and zeroed: about half of the time of a step on images of a
    few MB. With both limits at 1 GiB freed memory stays.

    Call it where a program starts, before large arrays are made: it concerns the whole process, so it is not the
    library's to do on import.

    Returns
    -------
    bool
        Whether anything was set: False where the C library is not glibc.

    References
    ----------
    mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    # Others (musl) have no mallopt, or one that does nothing.
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    kept = library.mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW_BYTES)
    return bool(library.mallopt(_M_TRIM_THRESHOLD, _KEEP_BELOW_BYTES) and kept)
