"""``mnist``: the four IDX files of MNIST, gzipped or not, from a folder. Nothing is downloaded unless asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .dataset import ArrayDataset
from .download import download as fetch_file
from .idx import read_idx

MEAN = 0.1307
"""Mean of all pixels of the training images, scaled to 0..1."""
STD = 0.3081
"""Their standard deviation."""

SOURCES = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


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
        "pass download=True"
    )


def download_mnist(data_dir: Path) -> None:
    """Fetch those of the four files, 11 MB together, into ``data_dir`` that are not there yet; checks their SHA-256.

    Raises
    ------
    OSError
        If that is not possible; the text says which file, from where, and what to do without a network.
    """
    for name, digest in SHA256.items():
        try:
            find_idx(data_dir, name)
        except FileNotFoundError:
            fetch_file(name, data_dir, SOURCES, digest)


def mnist(data_dir: str | Path, train: bool = True, *, download: bool = False) -> ArrayDataset:
    """Return MNIST's 60,000 training or 10,000 test images.

    Parameters
    ----------
    data_dir : path
        Folder of the four IDX files, gzipped or not; torchvision's ``MNIST/raw`` in it is looked into, too.
    train : bool, default True
        The training images, or those for the test.
    download : bool, default False
        Fetch files that are missing. Several ranks may do so at once; `shared_on_node` lets one a node do it.

    Returns
    -------
    ArrayDataset
        Images, float32 (n, 1, 28, 28), of about zero mean and unit variance, and labels, int64 (n,).

    Raises
    ------
    FileNotFoundError
        If a file is missing; the text names it and the cure.
    OSError
        If one cannot be fetched.
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
    pixels = np.array(images, np.float32)[:, None]
    pixels /= 255
    pixels -= MEAN
    pixels /= STD
    return ArrayDataset(pixels, np.array(labels, np.int64))


__all__ = ["mnist"]
