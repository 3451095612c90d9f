"""Samples and labels in files of one's own, as training and test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mpiddp.typing import Array

from .dataset import ArrayDataset, Subset, random_split
from .idx import read_idx
from .mapped import npz_names, open_npy, open_npz

TEST_SHARE = 0.1
"""Of the samples, where the files do not say which are for the test."""

NAMES = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x", "y"),
    ("images", "labels"),
    ("arr_0", "arr_1"),
)
"""What the arrays may be called where they have names: samples and labels, for training and for the test."""


def open_labelled(kind: str, places: Sequence[str | Path]) -> list[Array]:
    """Open samples and labels, and those for the test where there are some.

    Parameters
    ----------
    kind : {"npy", "npz", "idx"}
        The format of the files.
    places : sequence of path
        For "npz" one file, and for "npy" possibly one folder, whose arrays have one of the `NAMES`. Else 2 or 4 files:
        samples, labels, and those for the test.

    Returns
    -------
    list of ndarray
        2 or 4 arrays. Samples are as in the file, and mapped where they are not compressed; labels are int64 (n,).

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If one is damaged, names or number of files are none of these, or labels are none or do not fit the samples.
    """
    paths = [Path(place) for place in places]
    if kind == "npz" and len(paths) == 1:
        arrays = open_npz(paths[0], _known_names(npz_names(paths[0]), str(paths[0])))
    elif kind == "npy" and len(paths) == 1 and paths[0].is_dir():
        found = {path.stem: path for path in sorted(paths[0].glob("*.npy"))}
        arrays = [open_npy(found[name]) for name in _known_names(found, str(paths[0]))]
    elif kind in ("npy", "idx") and len(paths) in (2, 4):
        arrays = [open_npy(path) if kind == "npy" else read_idx(path) for path in paths]
    else:
        wanted = {"npz": "one file", "npy": "one folder, or 2 or 4 files", "idx": "2 or 4 files"}[kind]
        raise ValueError(f"{kind} data is {wanted} (samples, labels, and those for the test), got {len(paths)}")
    return [_checked(x, arrays[i - 1], places) if i % 2 else x for i, x in enumerate(arrays)]


def _known_names(names: Mapping[str, Path] | Sequence[str], label: str) -> Sequence[str]:
    """Return the first of `NAMES` that are all there."""
    for known in NAMES:
        if set(known) <= set(names):
            return known
    wanted = " or ".join(", ".join(known) for known in NAMES)
    raise ValueError(f"{label} has arrays {', '.join(names) or 'of no name'}; expected {wanted}")


def _checked(labels: Array, samples: Array, places: Sequence[str | Path]) -> Array:
    """Return labels as int64 (n,)."""
    fits = samples.ndim > 1 and labels.shape in ((len(samples),), (len(samples), 1))
    if not fits or labels.dtype.kind not in "iub":
        raise ValueError(
            f"{', '.join(map(str, places))}: expected samples (n, ...) and integer labels (n,), got {samples.dtype} "
            f"{samples.shape} and {labels.dtype} {labels.shape}"
        )
    if samples.dtype.kind not in "iufb":
        raise ValueError(f"{', '.join(map(str, places))}: expected samples of real numbers, got {samples.dtype}")
    return np.array(labels, np.int64).reshape(-1)


def as_inputs(samples: Array) -> Array:
    """Return a batch as float32; bytes become 0 to 1, and images (n, height, width) get an axis for their channel."""
    scaled = samples.astype(np.float32)
    if samples.dtype == np.uint8:
        scaled /= 255
    return scaled[:, None] if scaled.ndim == 3 else scaled


def labelled(arrays: Sequence[Array], seed: int = 0) -> tuple[ArrayDataset | Subset, ArrayDataset | Subset]:
    """Return training and test data of 2 or 4 arrays, as `open_labelled` gives them.

    Parameters
    ----------
    arrays : sequence of ndarray
        Samples and labels, and those for the test. Without these a tenth of the samples, chosen at random, is kept for
        the test.
    seed : int, default 0
        Of that choice.

    Returns
    -------
    tuple
        Two data sets, whose samples pass through `as_inputs` batch by batch; the arrays stay as they are.

    Raises
    ------
    ValueError
        If there are not enough samples for both.
    """
    train = ArrayDataset(*arrays[:2], transform=as_inputs)
    if len(arrays) == 4:
        return train, ArrayDataset(*arrays[2:], transform=as_inputs)
    if len(train) < 2:
        raise ValueError(f"at least 2 samples are needed, one to train on and one for the test; there are {len(train)}")
    tests = max(round(TEST_SHARE * len(train)), 1)
    kept, test = random_split(train, [len(train) - tests, tests], seed)
    return kept, test


__all__ = ["as_inputs", "labelled", "open_labelled"]
