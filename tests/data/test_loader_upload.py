"""Batches on a device: a fake one, whose copies and kernels are done as late as CUDA allows."""

import threading
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from mpiddp.data import ArrayDataset, BatchShare, DataLoader, GlobalBatchSampler
from mpiddp.device import pinned

WORKERS = [0, 1, 3]
Pair = namedtuple("Pair", "x label")


def made(n: int) -> ArrayDataset:
    return ArrayDataset(np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32), np.arange(n))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("n", [0, 1, 4, 5, 60])
def test_batches_are_those_of_the_host_on_the_device(cupy: Any, n: int, workers: int) -> None:
    expected = list(DataLoader(made(n), 4))
    loader = DataLoader(made(n), 4, num_workers=workers, device="cuda")
    for _ in range(2):
        results = []
        for x, y in loader:
            assert isinstance(x, cupy.ndarray) and x.dtype == np.float32 and y.dtype == np.int64
            results.append((x * 2, y + 1))  # queued on the consumer's stream; the batch is dropped at once
            del x, y
        for (x, y), (x_host, y_host) in zip(results, expected, strict=True):
            assert np.array_equal(x.get(), x_host * 2) and np.array_equal(y.get(), y_host + 1)


@pytest.mark.parametrize("workers", WORKERS)
def test_the_host_does_not_wait(cupy: Any, waits: list[str], workers: int) -> None:
    total = cupy.zeros(3, np.float32)
    for x, _ in DataLoader(made(40), 4, num_workers=workers, device="cuda"):
        total += x.sum(0)
    assert waits == []
    assert np.allclose(total.get(), made(40).arrays[0].sum(0), atol=1e-5)


def test_structures_and_what_is_no_number(cupy: Any) -> None:
    class Words:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return {"pair": Pair(np.full(2, index), 1.5 * index), "word": "abcd"[index], "list": [np.array("x")]}

    first, _ = DataLoader(Words(), 2, device="cuda")
    assert type(first["pair"]) is Pair and first["word"] == ["a", "b"]
    assert first["pair"].x.get().tolist() == [[0, 0], [1, 1]] and first["pair"].label.get().tolist() == [0, 1.5]
    assert type(first["list"][0]) is np.ndarray
    (words,) = DataLoader("ab", 2, device="cuda")
    assert words == ["a", "b"]


def test_pinned_memory_is_used_again(cupy: Any) -> None:
    for _ in range(3):
        for x, _ in DataLoader(made(200), 4, num_workers=2, device="cuda"):
            x.sum().get()
    kept = sum(map(len, pinned._free.values()))
    # Five on their way or waiting, two in the workers, two in use: of two arrays each.
    assert 2 <= kept <= 24, kept


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loop_that_is_left(cupy: Any, workers: int) -> None:
    for x, _ in DataLoader(made(200), 4, num_workers=workers, device="cuda"):
        kept = x
        break
    others = [cupy.zeros((4, 3), np.float32) for _ in range(8)]  # where the memory of what was sent may be used again
    assert np.array_equal(kept.get(), made(200).arrays[0][:4])
    cupy.cuda.Device().synchronize()
    assert all((each.get() == 0).all() for each in others)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mpiddp-loader")]


@pytest.mark.parametrize("workers", WORKERS)
def test_shares_states_and_errors_are_those_of_the_batch_handed_over(cupy: Any, workers: int) -> None:
    data = made(10)
    host = DataLoader(data, batch_sampler=GlobalBatchSampler(data, 4, 3, 2))
    loader = DataLoader(data, batch_sampler=GlobalBatchSampler(data, 4, 3, 2), num_workers=workers, device="cuda")
    shares = []
    for _ in zip(host, loader, strict=True):
        assert loader.current == host.current and loader.state_dict() == host.state_dict()
        shares.append(loader.current)
    assert shares == [BatchShare(0, 1, 4), BatchShare(1, 1, 4), BatchShare(2, 0, 2)]

    class Broken(ArrayDataset):
        def batch(self, indices: Any) -> Any:
            if 12 in indices:
                raise KeyError("sample 12")
            return super().batch(indices)

    got = []
    with pytest.raises(KeyError, match="sample 12"):
        for _, y in DataLoader(Broken(*made(20).arrays), 4, num_workers=workers, device="cuda"):
            got += y.get().tolist()
    assert got == list(range(12))


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match="device should be 'cpu' or 'cuda', got 'gpu'"):
        DataLoader(range(3), device="gpu")  # type: ignore[arg-type]
