from collections import namedtuple
from random import Random
from typing import Any

import numpy as np
import pytest

from mpiddp.data import ArrayDataset, DataPartitioner, Dataset, Subset, default_collate, random_split


def arrays(n: int = 5) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(2.0 * n).reshape(n, 2), np.arange(n) * 10


def same(left: Any, right: Any) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert np.array_equal(a, b)


def test_array_dataset() -> None:
    x, y = arrays()
    data = ArrayDataset(x, y)
    assert len(data) == 5 and isinstance(data, Dataset) and isinstance([], Dataset)
    same(data[3], (x[3], y[3]))
    same(data[-1], (x[4], y[4]))
    for index in ([4, 0, 0], np.array([4, 0, 0]), slice(1, 3), np.array([], int)):
        same(data[index], (x[index], y[index]))
    same(data.batch(np.array([2])), (x[2:3], y[2:3]))
    with pytest.raises(IndexError):
        data[5]


def test_iterating_a_data_set_ends() -> None:
    assert [int(y) for _, y in ArrayDataset(*arrays())] == [0, 10, 20, 30, 40]
    assert [int(y) for _, y in Subset(ArrayDataset(*arrays()), [1, 2])] == [10, 20]


def test_transform_sees_batches() -> None:
    x, y = arrays()
    shapes = []

    def double(batch: np.ndarray) -> np.ndarray:
        shapes.append(batch.shape)
        return batch * 2

    data = ArrayDataset(x, y, transform=double)
    same(data[1], (x[1] * 2, y[1]))
    same(data[[1, 2, 3]], (x[1:4] * 2, y[1:4]))
    assert shapes == [(1, 2), (3, 2)]


@pytest.mark.parametrize("bad", [(), (np.zeros(3), np.zeros(4)), (np.zeros(()),), (np.zeros(3), np.zeros(()))])
def test_array_dataset_refuses(bad: Any) -> None:
    with pytest.raises(ValueError, match="ArrayDataset needs"):
        ArrayDataset(*bad)


@pytest.mark.parametrize("whole", [ArrayDataset(*arrays(6)), list(zip(*arrays(6), strict=True))])
def test_subset_of_a_subset(whole: Any) -> None:
    part = Subset(Subset(whole, [5, 3, 1, 1]), [3, 0])
    x, y = arrays(6)
    assert len(part) == 2
    same(part[0], (x[1], y[1]))
    same(part[-1], (x[5], y[5]))
    same(part.batch(np.array([1, 0, 1])), (x[[5, 1, 5]], y[[5, 1, 5]]))
    same(part[:], (x[[1, 5]], y[[1, 5]]))
    with pytest.raises(IndexError):
        part[2]


def test_random_split_equals_torch(torch: Any) -> None:
    for n, lengths in [(10, [7, 3]), (10, [0.5, 0.25, 0.25]), (11, [0.3, 0.3, 0.4]), (7, [1.0]), (3, [0, 3])]:
        theirs = torch.utils.data.random_split(range(n), lengths, torch.Generator().manual_seed(5))
        mine = random_split(range(n), lengths, seed=5)
        assert [part.indices.tolist() for part in mine] == [list(part.indices) for part in theirs]


@pytest.mark.parametrize("lengths", [[3, 3], [0.5, 0.6], [-1, 11], []])
def test_random_split_refuses(lengths: Any) -> None:
    with pytest.raises(ValueError, match="add up to 10"):
        random_split(range(10), lengths)


def tutorial(n: int, sizes: list[float], seed: int) -> list[list[int]]:
    """Return the tutorial's partitions, in its own words."""
    rng = Random()
    rng.seed(seed)
    indexes = list(range(n))
    rng.shuffle(indexes)
    partitions = []
    for fraction in sizes:
        length = int(fraction * n)
        partitions.append(indexes[:length])
        indexes = indexes[length:]
    return partitions


@pytest.mark.parametrize("sizes", [[0.7, 0.2, 0.1], [1.0], [1 / 3] * 3, [1 / 49] * 49, [0.5], [0.0, 1.0]])
@pytest.mark.parametrize("n", [0, 1, 10, 97, 1437])
def test_partitions_are_the_tutorials(n: int, sizes: list[float]) -> None:
    for seed in (1234, 0):
        partitioner = DataPartitioner(range(n), sizes, seed)
        parts = [partitioner.use(i) for i in range(len(sizes))]
        expected = tutorial(n, sizes, seed)
        assert [list(part) for part in parts] == expected
        assert [len(part) for part in parts] == [len(part) for part in expected]


def test_partition_defaults_and_batches() -> None:
    partitioner = DataPartitioner(ArrayDataset(*arrays(100)))
    assert [len(partitioner.use(i)) for i in range(3)] == [70, 20, 10]
    part = partitioner.use(2)
    _, labels = part.batch(np.arange(10))
    assert labels.tolist() == [10 * i for i in tutorial(100, [0.7, 0.2, 0.1], 1234)[2]]


def test_partitioner_refuses() -> None:
    for sizes in ([0.7, 0.4], [1.2, -0.2], [], [2]):
        with pytest.raises(ValueError, match="sum at most 1"):
            DataPartitioner(range(10), sizes)
    for i in (-1, 3):
        with pytest.raises(IndexError, match=f"parts 0 to 2, got {i}"):
            DataPartitioner(range(10)).use(i)


def test_collate() -> None:
    Pair = namedtuple("Pair", "x y")
    same(
        default_collate([(np.ones(2, np.float32), 1), (np.zeros(2, np.float32), 2)]),
        (np.array([[1, 1], [0, 0]]), [1, 2]),
    )
    assert default_collate([np.float32(1), np.float32(2)]).dtype == np.float32
    assert default_collate([1, 2]).dtype == np.int64
    assert default_collate([True, False]).dtype == np.bool_
    assert default_collate([1.5, 2.5]).dtype == np.float64
    assert default_collate(["a", "b"]) == ["a", "b"] and default_collate([b"a"]) == [b"a"]
    pair = default_collate([Pair(1, 2), Pair(3, 4)])
    assert isinstance(pair, Pair) and pair.x.tolist() == [1, 3]
    nested = default_collate([{"a": [1, (2.0, "s")]}, {"a": [3, (4.0, "t")]}])
    assert nested["a"][0].tolist() == [1, 3] and nested["a"][1][1] == ["s", "t"] and type(nested["a"]) is list
    with pytest.raises(ValueError, match="same shape"):
        default_collate([np.ones(3), np.ones(2)])
    with pytest.raises(ValueError, match="shorter"):
        default_collate([[1, 2], [1]])
    with pytest.raises(TypeError, match="not of object; pass a collate_fn"):
        default_collate([object()])
