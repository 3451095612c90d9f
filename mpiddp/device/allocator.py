"""The C library's allocator."""

import ctypes

_M_TRIM_THRESHOLD = -1  # glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_KEEP_BELOW_BYTES = 1 << 30


def tune_allocator() -> None:
    """Keep the memory of freed arrays in the process; call it before large arrays are made.

    glibc unmaps arrays of more than 128 KiB to 32 MiB, so that every training step faults in and zeroes the same pages
    again, half of its time on images of a few MB. See mallopt(3).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):  # musl has no mallopt, or one that does nothing
        library.mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEEP_BELOW_BYTES)
