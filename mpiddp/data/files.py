"""Arrays from ``.npz`` and IDX files, and labelled samples made of them.

Arrays that a ``.npz`` file stores uncompressed are mapped, not read.
"""

import gzip
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from mpiddp.typing import Array

from .dataset import ArrayDataset, Subset, random_split


def read_idx(path: Path) -> Array:
    """Return the array of bytes in an IDX file, MNIST's format, gzipped or not.

    The header of such a file has two zero bytes, an 8 (for values of one byte), the number of dimensions, and their
    sizes as big-endian uint32 (http://yann.lecun.com/exdb/mnist/). Another header, or a length that does not fit it,
    raises ValueError.
    """
    content = path.read_bytes()
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        if content[:3] != b"\0\0\x08":
            raise ValueError(f"it starts with {content[:3].hex(' ') or 'nothing'}, expected 00 00 08")
        start = 4 + 4 * content[3]
        shape = tuple(int.from_bytes(content[at : at + 4]) for at in range(4, start, 4))
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is no whole IDX file of bytes ({error}); fetch it again") from error


_LOCAL_HEADER = struct.Struct("<26xHH")
"""Format of a zip member's local header; it unpacks only the lengths of the name and of the extra field."""
_DAMAGED = (
    *(ValueError, KeyError, EOFError, struct.error, zipfile.BadZipFile, zlib.error),
    *(SyntaxError, tokenize.TokenError),  # NumPy reads the header of an array as a Python expression
)


def open_npz(path: Path, choose: Callable[[list[str]], Sequence[str]]) -> list[Array]:
    """Return the arrays of a ``.npz`` file whose names ``choose`` returns, given all names in the file.

    An array is mapped if it is stored uncompressed (``numpy.savez``), else read. A damaged file, or an array of Python
    objects, raises ValueError.
    """
    arrays, reading = [], ""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            for name in choose([each.removesuffix(".npy") for each in archive.namelist()]):
                reading = f", array {name!r},"
                member = archive.getinfo(f"{name}.npy")
                if member.compress_type == zipfile.ZIP_STORED:
                    arrays.append(_mapped(path, file, member))
                else:
                    with archive.open(member) as packed:
                        arrays.append(np.lib.format.read_array(packed, allow_pickle=False))
    except _DAMAGED as error:
        raise ValueError(f"{path}{reading} cannot be read ({error}); write it by numpy.savez") from error
    return arrays


def _mapped(path: Path, file: IO[bytes], member: zipfile.ZipInfo) -> Array:
    file.seek(member.header_offset)
    start = file.seek(sum(_LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))), 1)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"it holds Python objects ({dtype}), which would have to be unpickled")
    mapped: Array = np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
    if file.tell() + mapped.nbytes != start + member.file_size:
        raise ValueError("its header does not fit its size")
    return mapped


TEST_SHARE = 0.1
"""The share of the samples that `labelled` keeps for the test if the file has no arrays for it."""

NAMES = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x", "y"),
    ("images", "labels"),
    ("arr_0", "arr_1"),
)
"""Names of arrays that `open_labelled` accepts: samples and labels for training, and with four names for the test."""


def open_labelled(path: str | Path) -> list[Array]:
    """Return samples and labels of an ``.npz`` file, then samples and labels of the test if the file has them.

    The file's arrays must have one of the sets of `NAMES`. Samples are as in the file, mapped if uncompressed; labels
    are int64 (n,). A damaged file, other names, or labels that do not fit the samples raise ValueError.
    """
    path = Path(path)
    arrays = open_npz(path, _known_names)
    return [_checked(x, arrays[i - 1], path) if i % 2 else x for i, x in enumerate(arrays)]


def _known_names(names: Sequence[str]) -> Sequence[str]:
    for known in NAMES:
        if set(known) <= set(names):
            return known
    wanted = " or ".join(", ".join(known) for known in NAMES)
    raise ValueError(f"it has arrays {', '.join(names) or 'of no name'}; expected {wanted}")


def _checked(labels: Array, samples: Array, path: Path) -> Array:
    fits = samples.ndim > 1 and labels.shape in ((len(samples),), (len(samples), 1))
    if not fits or labels.dtype.kind not in "iub" or samples.dtype.kind not in "iufb":
        raise ValueError(
            f"{path}: expected samples (n, ...) of real numbers and integer labels (n,), got {samples.dtype} "
            f"{samples.shape} and {labels.dtype} {labels.shape}"
        )
    return np.array(labels, np.int64).reshape(-1)


def as_inputs(samples: Array) -> Array:
    """Return a batch as float32, ready for a model.

    Bytes are scaled to 0..1. Images (n, height, width) get an axis for the channel.
    """
    scaled = samples.astype(np.float32)
    if samples.dtype == np.uint8:
        scaled /= 255
    return scaled[:, None] if scaled.ndim == 3 else scaled


def labelled(arrays: Sequence[Array], seed: int = 0) -> tuple[ArrayDataset | Subset, ArrayDataset | Subset]:
    """Return training and test data made of the arrays of `open_labelled`.

    Batches of samples go through `as_inputs`. If there are no arrays for the test, a tenth of the samples, chosen by
    ``seed``, is the test data.
    """
    train = ArrayDataset(*arrays[:2], transform=as_inputs)
    if len(arrays) == 4:
        return train, ArrayDataset(*arrays[2:], transform=as_inputs)
    if len(train) < 2:
        raise ValueError(f"at least 2 samples are needed, one to train on and one for the test; there are {len(train)}")
    tests = max(round(TEST_SHARE * len(train)), 1)
    kept, test = random_split(train, [len(train) - tests, tests], seed)
    return kept, test
