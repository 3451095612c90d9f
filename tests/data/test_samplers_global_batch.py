import json
from itertools import chain
from typing import Any

import pytest

from mpiddp.data import BatchShare, GlobalBatchSampler, randperm


def batches(n: int, size: int, replicas: int, state: Any = None, **options: Any) -> list[list[int]]:
    """Return every global batch, put together from the ranks' shares."""
    together: list[list[int]] = []
    shares: list[list[BatchShare]] = []
    for rank in range(replicas):
        sampler = GlobalBatchSampler(range(n), size, replicas, rank, **options)
        if state is not None:
            sampler.load_state_dict(state)
        shares.append([])
        for k, indices in enumerate(sampler):
            share = sampler.current
            assert share is not None and len(indices) == max(share.samples, 1)
            shares[rank].append(share)
            if rank == 0:
                together.append([-1] * share.global_samples)
            together[k][rank::replicas] = indices[: share.samples].tolist()
    assert len({len(ranks) for ranks in shares}) == 1, "all ranks make equally many steps"
    for at_step in zip(*shares, strict=True):
        assert sum(share.samples for share in at_step) == at_step[0].global_samples
        assert len({(share.index, share.global_samples) for share in at_step}) == 1
    return together


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("n", "size"), [(0, 8), (1, 8), (2, 7), (7, 7), (8, 7), (24, 8), (100, 10), (101, 10), (1437, 64)]
)
def test_batches_do_not_depend_on_the_number_of_ranks(n: int, size: int, replicas: int, drop_last: bool) -> None:
    order = randperm(n, 3).tolist()
    expected = [order[k : k + size] for k in range(0, n, size)]
    if drop_last and expected and len(expected[-1]) < size:
        expected.pop()
    assert batches(n, size, replicas, seed=3, drop_last=drop_last) == expected
    assert len(GlobalBatchSampler(range(n), size, replicas, 0, drop_last=drop_last)) == len(expected)


@pytest.mark.parametrize("size_now", [4, 5, 9])
@pytest.mark.parametrize("now", [1, 2, 4])
@pytest.mark.parametrize("before", [1, 3])
def test_resuming_loses_and_repeats_nothing(before: int, now: int, size_now: int) -> None:
    n, size = 23, 5
    order = randperm(n, 9).tolist()
    for consumed in range(6):
        states = []
        for rank in range(before):
            sampler = GlobalBatchSampler(range(n), size, before, rank, seed=8)
            sampler.set_epoch(1)
            iterator = iter(sampler)
            for _ in range(min(consumed, 5)):
                next(iterator)
            states.append(json.dumps(sampler.state_dict()))
        assert len(set(states)) == 1, "all ranks have the same state"
        rest = batches(n, size_now, now, json.loads(states[0]), seed=8)
        assert list(chain.from_iterable(rest)) == order[consumed * size :]
        if size_now == size:
            assert rest == [order[k : k + size] for k in range(consumed * size, n, size)]


def test_refuses_batches_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="3 samples cannot be divided among 4 ranks"):
        GlobalBatchSampler(range(10), 3, 4, 0)
    with pytest.raises(ValueError, match="Invalid rank 2"):
        GlobalBatchSampler(range(10), 4, 2, 2)
