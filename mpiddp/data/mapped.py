"""Arrays in files: mapped into memory where the file holds them as they are, so that only what is used is read.

All ranks of a node that map a file share its pages. Imports NumPy and the standard library.
"""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from mpiddp.typing import Array

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a member of a zip file: the lengths of its name and of what else stands before its bytes."""
_DAMAGED = (ValueError, SyntaxError, tokenize.TokenError)
"""What NumPy raises for the header of an array that is none: it is a Python expression."""


def open_npy(path: Path) -> Array:
    """Map the array of a ``.npy`` file.

    Returns
    -------
    memmap
        Read-only, of the file's shape, dtype and order.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is something else, damaged, or holds Python objects, which are never unpickled; the text names it.
    """
    with path.open("rb") as file:
        return _map_array(path, file, str(path))


def open_npz(path: Path, names: Iterable[str]) -> list[Array]:
    """Return arrays of a ``.npz`` file: those that ``numpy.savez`` has stored as they are mapped, others read.

    Parameters
    ----------
    path : Path
        The file.
    names : iterable of str
        Which arrays (see `npz_names`).

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    KeyError
        If it has no array of a name.
    ValueError
        If it is something else, damaged, or holds Python objects; the text names it.
    """
    arrays = []
    with _zip(path) as archive, path.open("rb") as file:
        for name in names:
            member, label = archive.getinfo(f"{name}.npy"), f"{path}, array {name!r},"
            if member.compress_type == zipfile.ZIP_STORED:
                file.seek(member.header_offset)
                head = file.read(_LOCAL_HEADER.size)
                if len(head) < _LOCAL_HEADER.size:
                    raise ValueError(f"{label} is cut off; write or fetch the file again")
                start = file.seek(sum(_LOCAL_HEADER.unpack(head)), 1)
                mapped = _map_array(path, file, label)
                if file.tell() + mapped.nbytes != start + member.file_size:
                    raise ValueError(f"{label} is damaged: its header does not fit its size; write or fetch it again")
                arrays.append(mapped)
                continue
            try:
                with archive.open(member) as packed:
                    arrays.append(np.lib.format.read_array(packed, allow_pickle=False))
            except (*_DAMAGED, EOFError, zipfile.BadZipFile, zlib.error) as error:
                raise ValueError(f"{label} cannot be read ({error}); write or fetch the file again") from error
    return arrays


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays in a ``.npz`` file.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no such file, or it is something else.
    """
    with _zip(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def _zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is no .npz file, or is truncated ({error}); numpy.savez writes one") from error


def _map_array(path: Path, file: IO[bytes], label: str) -> Array:
    """Map the array whose ``.npy`` header ``file`` stands at."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"it holds Python objects ({dtype}), which would have to be unpickled")
        mapped: Array = np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
    except _DAMAGED as error:
        raise ValueError(f"{label} cannot be mapped ({error}); numpy.save and numpy.savez write such files") from error
    return mapped


__all__ = ["npz_names", "open_npy", "open_npz"]
