"""IDX, the format of MNIST's files: arrays of big-endian numbers, gzipped or not."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np

from mpiddp.typing import Array

IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Array:
    """Return the array of an IDX file.

    Parameters
    ----------
    path : Path
        The file. Gzip is told by its first bytes, not by its name.

    Returns
    -------
    ndarray
        Of the file's shape and type, in native byte order. Bytes that are not gzipped are mapped (``numpy.memmap``),
        so that only what is used is read; everything else is a copy.

    Raises
    ------
    ValueError
        If the file is no IDX file, or is longer or shorter than its header says.

    References
    ----------
    http://yann.lecun.com/exdb/mnist/, "The IDX file format": two zero bytes, a type, the number of dimensions, their
    sizes as big-endian uint32, then the elements in C order.
    """
    content: Array = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    packed = content[:2].tobytes() == b"\x1f\x8b"
    if packed:
        try:
            content = np.frombuffer(gzip.decompress(content.data), np.uint8)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path} is a truncated or damaged gzip file ({error}); fetch it again") from error
    head = content[:4].tobytes()
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_DTYPES:
        raise ValueError(
            f"{path} is no IDX file: it starts with {head.hex(' ') or 'nothing'}, expected 00 00, a type of "
            f"{', '.join(f'{code:02x}' for code in IDX_DTYPES)}, and the number of dimensions; fetch it again"
        )
    dtype, dimensions = np.dtype(IDX_DTYPES[head[2]]), head[3]
    start = 4 + 4 * dimensions
    shape = tuple(content[4 : min(start, len(content) // 4 * 4)].view(">u4").tolist())
    expected = start + math.prod(shape) * dtype.itemsize
    if len(shape) < dimensions or len(content) != expected:
        raise ValueError(
            f"{path} holds {len(content)} bytes, its header speaks of {expected} (shape {shape}, {dtype.name}); "
            "it is truncated or damaged, fetch it again"
        )
    if dtype.itemsize == 1 and not packed:
        return np.memmap(path, dtype, "r", start, shape)
    return np.array(content[start:].view(dtype).reshape(shape), dtype.newbyteorder("="))


__all__ = ["read_idx"]
