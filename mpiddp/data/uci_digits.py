"""``digits``: 1,797 real handwritten digits, shipped with the package, so that a first run needs no download.

The images are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49), licensed under Creative Commons Attribution 4.0 International
(CC BY 4.0), in the order of the copy in scikit-learn (``sklearn.datasets.load_digits``), from which ``digits.npz`` was
made. The file's entry ``README`` says the same.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from mpiddp.typing import Array

from .dataset import ArrayDataset
from .permutation import randperm

TRAIN_SAMPLES = 1437
"""Four fifths of the images; 360 remain for the test."""
MEAN = 0.305
"""Mean of all pixels of all images, scaled to 28 x 28 and to 0..1."""
STD = 0.325
"""Their standard deviation."""


def bilinear_weights(source: int, target: int) -> Array:
    """Return the matrix, float64 (target, source), that resamples ``source`` pixels to ``target`` linearly.

    Pixels are areas: centre ``i`` of the target lies at ``(i + 0.5) * source / target - 0.5`` of the source, and
    beyond the outermost centres the outermost pixel goes on (torch: ``align_corners=False``).
    """
    centre = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
    weights: Array = np.maximum(0, 1 - np.abs(centre[:, None] - np.arange(source)))
    return weights


def raw_digits() -> tuple[Array, Array]:
    """Return the images as scanned, uint8 (1797, 8, 8) of 0 to 16, and their labels, uint8 (1797,)."""
    with (resources.files(__package__) / "digits.npz").open("rb") as file, np.load(file) as content:
        return content["images"], content["labels"]


def digits(train: bool = True, *, size: int = 28, seed: int = 0) -> ArrayDataset:
    """Return the digits, normalised and scaled so that a network for MNIST takes them.

    Parameters
    ----------
    train : bool, default True
        The 1,437 images for training, or the 360 for the test.
    size : int, default 28
        Height and width of an image in pixels; 8 is as scanned.
    seed : int, default 0
        Seed of the split; training and test are disjoint for the same seed.

    Returns
    -------
    ArrayDataset
        Images, float32 (n, 1, size, size), of about zero mean and unit variance, and labels, int64 (n,).

    Examples
    --------
    >>> images, labels = digits(train=False).arrays
    >>> images.shape, labels.shape
    ((360, 1, 28, 28), (360,))
    """
    pixels, labels = raw_digits()
    order = randperm(len(labels), seed)
    chosen = order[:TRAIN_SAMPLES] if train else order[TRAIN_SAMPLES:]
    weights = bilinear_weights(pixels.shape[-1], size)
    images = weights @ (pixels[chosen] / 16) @ weights.T
    return ArrayDataset(((images - MEAN) / STD).astype(np.float32)[:, None], labels[chosen].astype(np.int64))


__all__ = ["digits", "raw_digits"]
