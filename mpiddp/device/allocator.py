"""A setting of the C library's memory allocator."""

import ctypes

_M_TRIM_THRESHOLD = -1  # glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_KEEP_BELOW_BYTES = 1 << 30


def tune_allocator() -> None:
    """Keep the memory of freed arrays in the process. Call this before large arrays are made.

    glibc gives freed arrays above a size between 128 KiB and 32 MiB back to the system. Then every training step has to
    fault in and zero the same pages again, which took half of its time on images of a few MB. See mallopt(3).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):  # musl has no mallopt, or one that does nothing
        library.mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEEP_BELOW_BYTES)
