import gc
import threading
import time
import traceback
from itertools import chain
from typing import Any

import numpy as np
import pytest

from mpiddp.data import ArrayDataset, DataLoader, DistributedSampler, GlobalBatchSampler

WORKERS = [0, 1, 3]


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mpiddp-loader")]


@pytest.fixture(autouse=True)
def no_threads_left() -> Any:
    yield
    if loader_threads():
        gc.collect()
    assert not loader_threads()


class Slow:
    """Later samples are ready earlier, if workers do not wait for each other."""

    def __init__(self, n: int, fail_at: int | None = None) -> None:
        self.n, self.fail_at, self.fetched = n, fail_at, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self.fetched += 1
        if index == self.fail_at:
            raise KeyError(f"sample {index} is broken")
        time.sleep(0.002 * (index % 3 == 0))
        return np.full(2, index), index


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n", "size"), [(0, 3), (1, 3), (2, 3), (3, 3), (10, 3), (12, 3), (5, 1), (5, 100)])
def test_batches_in_order(n: int, size: int, drop_last: bool, workers: int) -> None:
    expected = [list(range(k, min(k + size, n))) for k in range(0, n, size)]
    if drop_last and expected and len(expected[-1]) < size:
        expected.pop()
    for dataset in (Slow(n), ArrayDataset(np.arange(n)[:, None].repeat(2, 1), np.arange(n))):
        loader = DataLoader(dataset, size, num_workers=workers, drop_last=drop_last)
        assert len(loader) == len(expected)
        for _ in range(2):
            batches = list(loader)
            assert [y.tolist() for _, y in batches] == expected
            assert all(x.shape == (len(y), 2) and (x == y[:, None]).all() for x, y in batches)
    assert loader.current is None


@pytest.mark.parametrize("workers", WORKERS)
def test_a_workers_exception_comes_at_its_place_with_its_traceback(workers: int) -> None:
    got = []
    with pytest.raises(KeyError, match="sample 7 is broken") as caught:
        for _, y in DataLoader(Slow(20, fail_at=7), 2, num_workers=workers):
            got.extend(y.tolist())
    assert got == [0, 1, 2, 3, 4, 5]
    assert "__getitem__" in "".join(traceback.format_exception(caught.value))


def test_an_abandoned_iterator_leaves_no_threads() -> None:
    for _ in DataLoader(Slow(1000), 2, num_workers=3):
        assert loader_threads()
        break
    gc.collect()
    assert not loader_threads()


def test_workers_fetch_ahead_but_not_without_bound() -> None:
    dataset = Slow(1000)
    iterator = iter(DataLoader(dataset, 2, num_workers=2, prefetch_factor=3))
    next(iterator)
    deadline = time.monotonic() + 5
    while dataset.fetched < 14 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert dataset.fetched == 2 * (1 + 2 * 3)


def test_workers_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=10)

    class Meet(Slow):
        def __getitem__(self, index: int) -> Any:
            both.wait()
            return index

    assert [y.tolist() for y in DataLoader(Meet(4), num_workers=2)] == [[0], [1], [2], [3]]


def test_misuse() -> None:
    data = range(10)
    with pytest.raises(ValueError, match="batch_size has to be at least 1, got 0"):
        DataLoader(data, 0)
    with pytest.raises(TypeError, match="has to be an integer, got '4'"):
        DataLoader(data, "4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(data, shuffle=True, sampler=range(len(data)))
    for options in ({"batch_size": 2}, {"shuffle": True}, {"sampler": data}, {"drop_last": True}):
        with pytest.raises(ValueError, match="batch_sampler option is mutually exclusive"):
            DataLoader(data, batch_sampler=[[0, 1], [2]], **options)  # type: ignore[arg-type]


def test_shuffle() -> None:
    first = [y.tolist() for y in DataLoader(range(50), 10, shuffle=True, generator=3)]
    drawn = list(chain.from_iterable(first))
    assert sorted(drawn) == list(range(50)) != drawn
    loader = DataLoader(range(50), 10, shuffle=True, generator=np.random.default_rng(3))
    assert [y.tolist() for y in loader] == first
    assert [y.tolist() for y in loader] != first, "each epoch has another order"


def test_batch_sampler_and_collate() -> None:
    loader = DataLoader(range(10), batch_sampler=[[3, 1], [7]])
    assert len(loader) == 2 and [y.tolist() for y in loader] == [[3, 1], [7]]
    data = ArrayDataset(np.arange(10))
    loader = DataLoader(data, 4, collate_fn=lambda samples: [int(x) * 10 for (x,) in samples])
    assert next(iter(loader)) == [0, 10, 20, 30]


def test_torchs_getitems_is_used() -> None:
    class Many(Slow):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError

        def __getitems__(self, indices: list[int]) -> list[int]:
            assert all(type(index) is int for index in indices)
            return [index * 2 for index in indices]

    assert [y.tolist() for y in DataLoader(Many(5), 3, pin_memory=True)] == [[0, 2, 4], [6, 8]]


@pytest.mark.parametrize("workers", WORKERS)
def test_state_is_that_of_the_batch_handed_over(workers: int) -> None:
    data = ArrayDataset(np.arange(23))

    def make(kind: str) -> DataLoader:
        if kind == "global":
            return DataLoader(data, batch_sampler=GlobalBatchSampler(data, 4, 1, 0), num_workers=workers)
        return DataLoader(data, 4, sampler=DistributedSampler(data, 2, 1), num_workers=workers)

    for kind in ("global", "distributed"):
        whole = make(kind)
        whole.set_epoch(2)
        expected = [x.tolist() for (x,) in whole]
        assert expected != [x.tolist() for (x,) in make(kind)], "the epoch is passed on"
        for consumed in range(len(expected) + 1):
            first = make(kind)
            first.set_epoch(2)
            iterator = iter(first)
            head = [next(iterator)[0].tolist() for _ in range(consumed)]
            state = first.state_dict()
            del iterator
            second = make(kind)
            second.load_state_dict(state)
            second.set_epoch(2)
            assert head + [x.tolist() for (x,) in second] == expected, (kind, consumed)


def test_loader_without_an_epoch_or_a_state() -> None:
    loader = DataLoader(range(4))
    loader.set_epoch(3)
    loader.load_state_dict(loader.state_dict())
    assert loader.state_dict() == {} and len(list(loader)) == 4
    fixed = DataLoader(range(4), batch_sampler=[[1]])
    fixed.set_epoch(3)
    fixed.load_state_dict({})
    assert fixed.state_dict() == {}


def test_positions_are_those_of_torch():
    loader = DataLoader(range(10), 1, False, None, [[3, 1], [7]], 2, None, False, False)
    assert [list(batch) for batch in loader] == [[3, 1], [7]] and loader.num_workers == 2
