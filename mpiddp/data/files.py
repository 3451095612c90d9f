"""Arrays in files (npz, IDX), mapped where stored uncompressed, and labelled samples made of them."""

from __future__ import annotations

import gzip
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from mpiddp.typing import Array

from .dataset import ArrayDataset, Subset, random_split

IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Array:
    """Return the array of an IDX file, MNIST's format, mapped (``numpy.memmap``) if of bytes and not gzipped.

    ValueError if it is none, or its length does not fit its header: two zero bytes, a type, the number of dimensions,
    their sizes as big-endian uint32 (http://yann.lecun.com/exdb/mnist/).
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


_LOCAL_HEADER = struct.Struct("<26xHH")
"""Lengths of a zip member's name and extra field."""
_DAMAGED = (ValueError, SyntaxError, tokenize.TokenError)
"""NumPy's errors for a damaged header, which is a Python expression."""


def open_npz(path: Path, names: Iterable[str]) -> list[Array]:
    """Return arrays of a ``.npz`` file, mapped if stored uncompressed (``numpy.savez``), else read.

    KeyError for a missing name; ValueError if it is damaged, or holds Python objects.
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
    with _zip(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def _zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is no .npz file, or is truncated ({error}); numpy.savez writes one") from error


def _map_array(path: Path, file: IO[bytes], label: str) -> Array:
    """Map the array whose ``.npy`` header begins at the file's position."""
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


TEST_SHARE = 0.1
"""The share of the samples that becomes the test, if the files have none."""

NAMES = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x", "y"),
    ("images", "labels"),
    ("arr_0", "arr_1"),
)
"""Accepted names of samples and labels, of training and test."""


def open_labelled(path: str | Path) -> list[Array]:
    """Open samples and labels of an ``.npz`` file, and those of the test if there are any, by one of the `NAMES`.

    The arrays are samples as in the file, mapped if uncompressed, and labels, int64 (n,). ValueError if the file is
    damaged, names are others, or labels do not fit the samples.
    """
    path = Path(path)
    arrays = open_npz(path, _known_names(npz_names(path), path))
    return [_checked(x, arrays[i - 1], path) if i % 2 else x for i, x in enumerate(arrays)]


def _known_names(names: Sequence[str], path: Path) -> Sequence[str]:
    for known in NAMES:
        if set(known) <= set(names):
            return known
    wanted = " or ".join(", ".join(known) for known in NAMES)
    raise ValueError(f"{path} has arrays {', '.join(names) or 'of no name'}; expected {wanted}")


def _checked(labels: Array, samples: Array, path: Path) -> Array:
    fits = samples.ndim > 1 and labels.shape in ((len(samples),), (len(samples), 1))
    if not fits or labels.dtype.kind not in "iub":
        raise ValueError(
            f"{path}: expected samples (n, ...) and integer labels (n,), got {samples.dtype} "
            f"{samples.shape} and {labels.dtype} {labels.shape}"
        )
    if samples.dtype.kind not in "iufb":
        raise ValueError(f"{path}: expected samples of real numbers, got {samples.dtype}")
    return np.array(labels, np.int64).reshape(-1)


def as_inputs(samples: Array) -> Array:
    """Return a batch as float32: bytes scaled to 0..1, images (n, height, width) with an axis for the channel."""
    scaled = samples.astype(np.float32)
    if samples.dtype == np.uint8:
        scaled /= 255
    return scaled[:, None] if scaled.ndim == 3 else scaled


def labelled(arrays: Sequence[Array], seed: int = 0) -> tuple[ArrayDataset | Subset, ArrayDataset | Subset]:
    """Return training and test data of the arrays of `open_labelled`.

    Samples go through `as_inputs`. Without arrays for the test a tenth of the samples, chosen by ``seed``, is the test.
    """
    train = ArrayDataset(*arrays[:2], transform=as_inputs)
    if len(arrays) == 4:
        return train, ArrayDataset(*arrays[2:], transform=as_inputs)
    if len(train) < 2:
        raise ValueError(f"at least 2 samples are needed, one to train on and one for the test; there are {len(train)}")
    tests = max(round(TEST_SHARE * len(train)), 1)
    kept, test = random_split(train, [len(train) - tests, tests], seed)
    return kept, test
