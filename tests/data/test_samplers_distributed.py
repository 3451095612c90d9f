import json
import warnings
from itertools import islice
from typing import Any

import pytest

from mpiddp.data import DataLoader, DistributedSampler


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7, 16])
def test_equals_torch(torch: Any, replicas: int, shuffle: bool, drop_last: bool) -> None:
    theirs_class = torch.utils.data.distributed.DistributedSampler
    for n in [1, 2, 3, 5, 6, 7, 8, 10, 15, 16, 17, 33, 100, 1437]:
        for rank in {0, 1 % replicas, replicas - 1}:
            for seed, epoch in [(0, 0), (0, 1), (1234, 17)]:
                options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
                found = []
                for kind in (DistributedSampler, theirs_class):
                    sampler = kind(range(n), replicas, rank, **options)
                    sampler.set_epoch(epoch)
                    found.append((list(sampler), len(sampler), sampler.num_samples, sampler.total_size))
                assert found[0] == found[1], (n, replicas, rank, options, epoch)


@pytest.mark.parametrize("now", [1, 2, 3, 5])
@pytest.mark.parametrize("before", [1, 3, 4])
def test_resuming_loses_and_repeats_nothing(before: int, now: int) -> None:
    n = 23
    for consumed in range(-(-n // before) + 1):
        samplers = [DistributedSampler(range(n), before, rank, seed=5) for rank in range(before)]
        seen = []
        for sampler in samplers:
            sampler.set_epoch(3)
            seen += list(islice(sampler, consumed))
        state = json.loads(json.dumps(samplers[0].state_dict()))
        rest = []
        for rank in range(now):
            sampler = DistributedSampler(range(n), now, rank, seed=5)
            sampler.load_state_dict(state)
            sampler.set_epoch(3)
            rest += list(sampler)
            assert sampler.position == n
        assert set(seen) | set(rest) == set(range(n))
        assert len(rest) == -(-max(n - consumed * before, 0) // now) * now


def test_set_epoch() -> None:
    sampler = DistributedSampler(range(20), 2, 0, shuffle=False)
    iterator = iter(sampler)
    next(iterator)
    state = sampler.state_dict()
    assert state["epoch"] == 0 and state["position"] == 2
    sampler.set_epoch(1)
    assert sampler.state_dict()["position"] == 0
    sampler.load_state_dict({**state, "epoch": 4})
    sampler.set_epoch(4)
    assert len(list(sampler)) == 9, "the restored epoch keeps its position"
    assert len(list(sampler)) == 10, "for one iteration"
    sampler.load_state_dict({**state, "epoch": 4})
    sampler.set_epoch(5)
    assert len(list(sampler)) == 10, "another epoch begins at its start"


@pytest.mark.parametrize(
    ("other", "text"),
    [({"seed": 1}, "seed=0.*seed=1"), ({"shuffle": False}, "shuffle=True.*shuffle=False")],
)
def test_a_state_of_another_order_is_refused(other: dict[str, Any], text: str) -> None:
    state = DistributedSampler(range(20), 2, 0).state_dict()
    with pytest.raises(ValueError, match=text):
        DistributedSampler(range(20), 2, 0, **other).load_state_dict(state)
    with pytest.raises(ValueError, match=r"length=20.*length=21"):
        DistributedSampler(range(21), 2, 0).load_state_dict(state)


def test_warns_once_when_set_epoch_is_forgotten() -> None:
    sampler = DistributedSampler(range(6), 2, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(sampler))  # a look at the first sample is not an epoch
        list(sampler)
        next(iter(sampler))  # multigpu_torchrun looks at a batch before it calls set_epoch
        sampler.set_epoch(1)
        list(sampler)
        sampler.load_state_dict(sampler.state_dict() | {"position": 2})  # the same epoch again, in the same process
        list(sampler)
    with pytest.warns(UserWarning, match=r"epoch 1 was iterated a second time.*set_epoch") as caught:
        list(DataLoader(range(6), 2, sampler=sampler))
    assert caught[0].filename == __file__, "the warning points into the package"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(sampler)
        unshuffled = DistributedSampler(range(6), 2, 0, shuffle=False)
        assert list(unshuffled) == list(unshuffled)


@pytest.mark.parametrize("rank", [-1, 3])
def test_refuses_ranks_that_are_none(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"Invalid rank {rank}, rank should be in the interval \[0, 2\]"):
        DistributedSampler(range(3), 3, rank)
