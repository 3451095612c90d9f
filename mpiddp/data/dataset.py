"""Data sets: the protocol, arrays, parts, and the collation of samples into batches.

A data set has a length and a sample for each index. It may also have a method ``batch(indices)``, which returns the
samples at ``indices``, int (n,), as arrays with a leading axis n. With that method, and without a ``collate_fn``,
:class:`~mpiddp.data.DataLoader` neither loops over samples nor stacks them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpiddp.device import array_namespace, is_device_array
from mpiddp.typing import Array

from .permutation import randperm


def default_collate(samples: list[Any]) -> Any:
    """Make a batch of samples of one structure (``torch.utils.data.default_collate``).

    Arrays become an array (n, ...), numbers an array (n,), strings and bytes a list. A tuple of these becomes a tuple
    of batches (torch makes a list); named tuples and lists keep their type, and mappings become dicts. Samples of
    different length or shape raise ValueError and need a ``collate_fn``. A sample of another type raises TypeError.

    Examples
    --------
    >>> default_collate([(np.zeros(3), 1), (np.ones(3), 0)])
    (array([[0., 0., 0.],
           [1., 1., 1.]]), array([1, 0]))
    """
    first = samples[0]
    if isinstance(first, np.ndarray) or is_device_array(first):
        return array_namespace(first).stack(samples)
    if isinstance(first, (bool, int, float, complex, np.generic)):
        return np.asarray(samples)
    if isinstance(first, (str, bytes)):
        return samples
    if isinstance(first, Mapping):
        return {key: default_collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        fields = [default_collate(list(field)) for field in zip(*samples, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*fields)
        return tuple(fields) if isinstance(first, tuple) else fields
    raise TypeError(
        f"default_collate makes batches of arrays, numbers, strings, tuples, lists and mappings, not of "
        f"{type(first).__name__}; pass a collate_fn"
    )


@runtime_checkable
class Dataset(Protocol):
    """Anything with a length and a sample for each index, such as a list or a data set of torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


def fetch(
    dataset: Dataset, indices: Sequence[int] | Array, collate_fn: Callable[[list[Any]], Any] | None = None
) -> Any:
    """Return the samples at ``indices`` as one batch.

    Without a ``collate_fn``, ``dataset.batch`` makes the batch if the data set has that method. Otherwise the samples
    come from ``dataset.__getitems__``, torch's name, or one by one from ``dataset.__getitem__``, and ``collate_fn`` or
    `default_collate` joins them.
    """
    if collate_fn is None and callable(batch := getattr(dataset, "batch", None)):
        return batch(np.asarray(indices, dtype=np.int64))
    listed = np.asarray(indices).tolist()
    many = getattr(dataset, "__getitems__", None)
    samples = many(listed) if callable(many) else [dataset[index] for index in listed]
    return (collate_fn or default_collate)(samples)


class ArrayDataset:
    """Samples along the first axis of NumPy or CuPy arrays of equal length.

    ``transform`` maps a batch (k, ...) of the first array; it gets a single sample as a batch of one. An index may be
    an integer, a slice, a list or an array.

    Examples
    --------
    >>> data = ArrayDataset(np.arange(6.0).reshape(3, 2), np.array([0, 1, 0]))
    >>> data[1]
    (array([2., 3.]), np.int64(1))
    """

    def __init__(self, *arrays: Array, transform: Callable[[Array], Array] | None = None) -> None:
        if not arrays:
            raise ValueError("ArrayDataset needs at least one array, got none")
        shapes = [array.shape for array in arrays]
        if not all(shapes) or len({shape[0] for shape in shapes}) != 1:
            raise ValueError(f"ArrayDataset needs arrays of equal length along their first axis, got shapes {shapes}")
        self.arrays = arrays
        self.transform = transform

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        if not isinstance(index, (int, np.integer)):
            return self.batch(index)
        first, *rest = (array[index] for array in self.arrays)
        return (first if self.transform is None else self.transform(first[None])[0], *rest)

    def batch(self, indices: Array) -> tuple[Array, ...]:
        """Return one array (len(indices), ...) for each array of the data set."""
        first, *rest = (array[indices] for array in self.arrays)
        return (first if self.transform is None else self.transform(first), *rest)


class Subset:
    """The samples of a data set at given indices, in order; repeats are allowed."""

    def __init__(self, dataset: Dataset, indices: Sequence[int] | Array) -> None:
        self.dataset = dataset
        self.indices: Array = np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[int(self.indices[index])] if isinstance(index, (int, np.integer)) else self.batch(index)

    def batch(self, indices: Array) -> Any:
        """Return samples of this subset as one batch."""
        return fetch(self.dataset, self.indices[indices])


def random_split(dataset: Dataset, lengths: Sequence[int | float], seed: int = 0) -> list[Subset]:
    """Split a data set into random parts, as ``torch.utils.data.random_split`` does with a generator of ``seed``.

    ``lengths`` add up to ``len(dataset)``, or are fractions that add up to 1.
    """
    n = len(dataset)
    fractions = abs(sum(lengths) - 1) < 1e-6 and n != 1
    sizes = [int(n * length) if fractions else int(length) for length in lengths]
    for i in range(n - sum(sizes) if fractions else 0):
        sizes[i % len(sizes)] += 1
    if sum(sizes) != n or any(length < 0 for length in lengths):
        raise ValueError(
            f"random_split needs lengths that add up to {n} or fractions that add up to 1, none negative; got {lengths}"
        )
    order = randperm(n, seed)
    return [Subset(dataset, part) for part in np.split(order, list(accumulate(sizes)))[:-1]]


class Partition(Subset):
    """One of the parts into which `DataPartitioner` cuts a data set."""


class DataPartitioner:
    """Cut a data set into random parts, as torch's tutorial on distributed applications does.

    A rank that trains on one part sees the same samples in every epoch; with
    :class:`~mpiddp.data.DistributedSampler` it sees others. Part ``i`` has ``int(sizes[i] * len(data))`` samples; the
    sum of ``sizes`` may be below 1. The tutorial is
    https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
    """

    def __init__(self, data: Dataset, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234) -> None:
        sizes = list(sizes)
        # Rounding can carry a sum above 1: that of [1 / 49] * 49 is 1.0000000000000007.
        if not sizes or min(sizes) < 0 or sum(sizes) > 1 + 1e-9:
            raise ValueError(
                f"DataPartitioner needs sizes that are fractions, none negative, of sum at most 1; got {sizes} of sum "
                f"{sum(sizes):g}. For equal parts pass [1 / n] * n"
            )
        self.data = data
        indexes = list(range(len(data)))
        random.Random(seed).shuffle(indexes)
        lengths = [int(size * len(data)) for size in sizes]
        self.partitions = [part.tolist() for part in np.split(indexes, list(accumulate(lengths)))[:-1]]

    def use(self, partition: int) -> Partition:
        """Return the part with the number ``partition``, counted from 0."""
        if not 0 <= partition < len(self.partitions):
            raise IndexError(
                f"DataPartitioner has parts 0 to {len(self.partitions) - 1}, got {partition}; give one size per rank"
            )
        return Partition(self.data, self.partitions[partition])
