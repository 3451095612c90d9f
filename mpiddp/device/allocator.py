"""The C library's allocator: freed memory of large arrays stays in the process."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_KEEP_BELOW_BYTES = 1 << 30


def tune_allocator() -> bool:
    """Keep the memory of freed arrays for the next ones.

    glibc maps every array of more than 128 KiB (a limit that grows to 32 MiB on its own) and unmaps it when it is
    freed, and trims the heap. So a training step maps, faults in and zeroes the same pages again: about half of its
    time on images of a few MB. With both limits at 1 GiB freed memory stays.

    Call it at the start of a program, before large arrays are made. It concerns the whole process, so the library does
    not do it on import.

    Returns
    -------
    bool
        True if both limits were set; False where the C library is not glibc.

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
