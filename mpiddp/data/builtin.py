"""Built-in data sets: UCI's digits (in the package), MNIST, and synthetic images.

``digits.npz`` is the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49), under CC BY 4.0, in the order of scikit-learn's copy; its
entry ``README`` says the same.
"""

from importlib import resources
from pathlib import Path

import numpy as np

from mpiddp.typing import Array, Shape

from .dataset import ArrayDataset
from .files import read_idx
from .permutation import randperm

TRAIN_SAMPLES = 1437
"""Number of images for training: four fifths of all."""
DIGITS_MEAN = 0.305
"""Mean of all pixels when the digits are resampled to 28 x 28 pixels and scaled to 0..1."""
DIGITS_STD = 0.325


def bilinear_weights(source: int, target: int) -> Array:
    """Return the matrix, float64 (target, source), that resamples ``source`` pixels to ``target`` linearly.

    A pixel is an area, not a point, as in torch's ``interpolate`` with ``align_corners=False``.
    """
    centre = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
    return np.maximum(0, 1 - np.abs(centre[:, None] - np.arange(source)))  # type: ignore[no-any-return]


def raw_digits() -> tuple[Array, Array]:
    """Return the images as scanned, uint8 (1797, 8, 8) of 0 to 16, and their labels, uint8 (1797,)."""
    with (resources.files(__package__) / "digits.npz").open("rb") as file, np.load(file) as content:
        return content["images"], content["labels"]


def digits(train: bool = True, *, size: int = 28, seed: int = 0) -> ArrayDataset:
    """Return 1,437 handwritten digits for training or 360 for the test, normalized and scaled.

    Images are float32 (n, 1, size, size), resampled from scans of 8 x 8 pixels. Labels are int64 (n,). ``seed`` decides
    which images are for training.
    """
    pixels, labels = raw_digits()
    order = randperm(len(labels), seed)
    chosen = order[:TRAIN_SAMPLES] if train else order[TRAIN_SAMPLES:]
    weights = bilinear_weights(pixels.shape[-1], size)
    images = weights @ (pixels[chosen] / 16) @ weights.T
    return ArrayDataset(
        ((images - DIGITS_MEAN) / DIGITS_STD).astype(np.float32)[:, None], labels[chosen].astype(np.int64)
    )


MNIST_MEAN = 0.1307
"""Mean of all pixels of the training images, scaled to 0..1."""
MNIST_STD = 0.3081

SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"
"""Addresses of MNIST's four files, as one pattern that curl expands."""


def find_idx(data_dir: Path, name: str) -> Path:
    """Return the path of one of MNIST's files below ``data_dir``, gzipped or not.

    If it is missing, FileNotFoundError has the command that fetches MNIST.
    """
    folders = [data_dir, data_dir / "MNIST" / "raw"]
    for folder in folders:
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    raise FileNotFoundError(
        f"{name} (or {name}.gz) is neither in {folders[0]} nor in {folders[1]}; fetch MNIST's four files: curl"
        f" --create-dirs --output-dir {data_dir} --remote-name-all '{SOURCE}'"
    )


def mnist(data_dir: str | Path, train: bool = True) -> ArrayDataset:
    """Return MNIST's 60,000 training or 10,000 test images, normalized.

    Images are float32 (n, 1, 28, 28), labels int64 (n,). ``data_dir`` has the four IDX files, gzipped or not, or
    torchvision's ``MNIST/raw``. A missing file raises FileNotFoundError, which has the command that fetches it. A
    damaged file, or images and labels that do not match, raise ValueError.
    """
    folder = Path(data_dir)
    part = "train" if train else "t10k"
    images_path = find_idx(folder, f"{part}-images-idx3-ubyte")
    labels_path = find_idx(folder, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{images_path} should hold images (n, 28, 28) and {labels_path} their labels (n,), got shapes "
            f"{images.shape} and {labels.shape}"
        )
    pixels = np.array(images, np.float32)[:, None]
    pixels /= 255
    pixels -= MNIST_MEAN
    pixels /= MNIST_STD
    return ArrayDataset(pixels, np.array(labels, np.int64))


def synthetic(
    n: int = 1024,
    shape: Shape = (1, 28, 28),
    classes: int = 10,
    seed: int = 0,
    *,
    train: bool = True,
    noise: float = 1.0,
) -> ArrayDataset:
    """Return noisy copies of one random prototype a class: learnable data of any shape and number.

    Samples are float32 (n, *shape), labels int64 (n,). The sizes of two classes differ by one sample at most.
    ``train=False`` gives other samples of the same classes. ``noise`` is the standard deviation of the noise; the
    prototypes have a standard deviation of 1.
    """
    prototypes = np.random.default_rng([seed, 0]).standard_normal((classes, *shape), dtype=np.float32)
    labels = np.arange(n) % classes
    samples = np.random.default_rng([seed, 1 if train else 2]).standard_normal((n, *shape), dtype=np.float32)
    samples *= np.float32(noise)
    samples += prototypes[labels]
    return ArrayDataset(samples, labels)
