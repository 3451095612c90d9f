"""``mnist``: the four IDX files of MNIST, gzipped or not, from a folder.

Nothing is downloaded unless asked for. The download needs pooch (the extra ``data``), which is imported then only.
"""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np

from mpiddp.typing import Array

from .dataset import ArrayDataset

MEAN = 0.1307
"""Mean of all pixels of the training images, scaled to 0..1."""
STD = 0.3081
"""Their standard deviation."""

SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}

IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Array:
    """Read an array from an IDX file, gzipped or not.

    Parameters
    ----------
    path : Path
        The file. Gzip is told by its first bytes, not by its name.

    Returns
    -------
    ndarray
        Of the file's shape and type, in native byte order.

    Raises
    ------
    ValueError
        If the file is no IDX file, or is longer or shorter than its header says.

    References
    ----------
    http://yann.lecun.com/exdb/mnist/, "The IDX file format": two zero bytes, a type, the number of dimensions, their
    sizes as big-endian uint32, then the elements in C order.
    """
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path} is a truncated or damaged gzip file ({error}); fetch it again") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_DTYPES:
        raise ValueError(
            f"{path} is no IDX file: it starts with {content[:4].hex(' ') or 'nothing'}, expected 00 00, a type of "
            f"{', '.join(f'{code:02x}' for code in IDX_DTYPES)}, and the number of dimensions; fetch it again"
        )
    dtype, dimensions = np.dtype(IDX_DTYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    shape = [int(size) for size in np.frombuffer(content[4 : min(start, len(content) // 4 * 4)], ">u4")]
    expected = start + math.prod(shape) * dtype.itemsize
    if len(shape) < dimensions or len(content) != expected:
        raise ValueError(
            f"{path} holds {len(content)} bytes, its header speaks of {expected} (shape {tuple(shape)}, {dtype.name}); "
            "it is truncated or damaged, fetch it again"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def find_idx(data_dir: Path, name: str) -> Path:
    """Return where file ``name`` (as in :data:`SHA256`) lies below ``data_dir``, gzipped or not.

    Raises
    ------
    FileNotFoundError
        If it is in none of the places; the text names them and the cure.
    """
    folders = [data_dir, data_dir / "MNIST" / "raw"]
    plain = name.removesuffix(".gz")
    for folder in folders:
        for candidate in (folder / plain, folder / name):
            if candidate.is_file():
                return candidate
    raise FileNotFoundError(
        f"{plain} (or {name}) is neither in {folders[0]} nor in {folders[1]}; put MNIST's four IDX files there, or "
        "pass download=True (needs pip install 'mpiddp[data]')"
    )


def download_mnist(data_dir: Path) -> None:
    """Fetch the four files, 11 MB together, into ``data_dir`` where they are not there yet; checks their SHA-256.

    Raises
    ------
    ModuleNotFoundError
        If pooch is not installed.
    """
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("downloading MNIST needs pooch: pip install 'mpiddp[data]'") from error
    for name, digest in SHA256.items():
        pooch.retrieve(SOURCE + name, known_hash=f"sha256:{digest}", fname=name, path=data_dir)


def mnist(data_dir: str | Path, train: bool = True, *, download: bool = False) -> ArrayDataset:
    """Return MNIST's 60,000 training or 10,000 test images.

    Parameters
    ----------
    data_dir : path
        Folder of the four IDX files, gzipped or not; torchvision's ``MNIST/raw`` in it is looked into, too.
    train : bool, default True
        The training images, or those for the test.
    download : bool, default False
        Fetch files that are missing. Where several ranks share the folder, let one do it before the others read.

    Returns
    -------
    ArrayDataset
        Images, float32 (n, 1, 28, 28), of about zero mean and unit variance, and labels, int64 (n,).

    Raises
    ------
    FileNotFoundError
        If a file is missing; the text names it and the cure.
    ValueError
        If a file is damaged, or images and labels do not belong together.
    """
    folder = Path(data_dir)
    part = "train" if train else "t10k"
    if download:
        download_mnist(folder)
    images_path = find_idx(folder, f"{part}-images-idx3-ubyte.gz")
    labels_path = find_idx(folder, f"{part}-labels-idx1-ubyte.gz")
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{images_path} should hold images (n, 28, 28) and {labels_path} their labels (n,), got shapes "
            f"{images.shape} and {labels.shape}"
        )
    pixels = images.astype(np.float32)[:, None]
    pixels /= 255
    pixels -= MEAN
    pixels /= STD
    return ArrayDataset(pixels, labels.astype(np.int64))


__all__ = ["mnist", "read_idx"]
