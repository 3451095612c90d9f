"""ZeroRedundancyOptimizer against the optimizer that it shares out."""

from typing import Any

import numpy as np
import pytest
from harness.learning import assert_close, assert_equal, assert_same_bits_everywhere, batch, mlp, share, step_of, values
from harness.world import World

import mpiddp as dist
from mpiddp import nn, optim

pytestmark = pytest.mark.mpi

ZeRO = dist.ZeroRedundancyOptimizer


def train(world: World, model: Any, optimizer: Any, steps: int, seed: int = 3) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        x, y = (share(part, world.rank, world.size) for part in batch(rng, 3 * world.size))
        optimizer.zero_grad()
        step_of(model, x, y)
        optimizer.step()


def layer() -> nn.Module:
    """Return a model of one parameter, and so of ranks without any."""
    nn.manual_seed(1)
    return nn.Linear(5, 3, bias=False)


@pytest.mark.parametrize(
    ("model", "make", "options"),
    [
        (mlp, optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (mlp, optim.Adam, {"lr": 0.01}),
        (mlp, optim.AdamW, {"lr": 0.01}),
        (layer, optim.Adam, {"lr": 0.1}),
    ],
)
def test_training_is_that_of_the_whole_optimizer(world: World, model: Any, make: Any, options: dict[str, Any]) -> None:
    one, two = (dist.DistributedDataParallel(model()) for _ in range(2))
    shared = ZeRO(one.parameters(), make, **options)
    train(world, one, shared, 6)
    train(world, two, make(two.parameters(), **options), 6)
    assert_equal(values(one), values(two))
    assert_same_bits_everywhere(values(one))


def test_state_is_shared_out_evenly(world: World) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 * world.size)))
    ddp = dist.DistributedDataParallel(model)
    optimizer = ZeRO(ddp.parameters(), optim.Adam, lr=0.01)
    ddp(np.ones((2, 8), np.float32)).sum().backward()
    optimizer.step()
    held = [name for record in optimizer.state.values() for name in record]
    assert held.count("exp_avg") == 4
    owners = list(optimizer._owners.values())
    assert sorted(owners) == sorted(list(range(world.size)) * 4)


def test_state_is_collected_saved_and_loaded(world: World) -> None:
    to = world.size - 1
    ddp = dist.DistributedDataParallel(mlp())
    groups = [{"params": [ddp.module[0].weight], "lr": 0.02}, {"params": list(ddp.parameters())[1:]}]
    optimizer = ZeRO(groups, optim.Adam, lr=0.01)
    train(world, ddp, optimizer, 3)
    with pytest.raises(RuntimeError, match="has not been consolidated on this rank"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to)
    box: list[Any] = [None]
    if world.rank == to:
        box = [optimizer.state_dict()]
        count = len(list(ddp.parameters()))
        assert sorted(box[0]["state"]) == list(range(count))
        assert [group["lr"] for group in box[0]["param_groups"]] == [0.02, 0.01]
    else:
        with pytest.raises(RuntimeError, match="has not been consolidated"):
            optimizer.state_dict()
    dist.broadcast_object_list(box, src=to)
    # A whole optimizer, and one that is shared out, both go on from there.
    others = []
    for make in (lambda g: optim.Adam(g, lr=0.5), lambda g: ZeRO(g, optim.Adam, lr=0.5)):
        model = dist.DistributedDataParallel(mlp())
        model.load_state_dict(ddp.state_dict())
        other = make([{"params": [model.module[0].weight]}, {"params": list(model.parameters())[1:]}])
        other.load_state_dict(box[0])
        train(world, model, other, 3, seed=9)
        others.append(values(model))
    train(world, ddp, optimizer, 3, seed=9)
    assert_equal(others[0], others[1])
    assert_equal(others[0], values(ddp))


def test_options_may_change_and_groups_be_added(world: World) -> None:
    one, two = (dist.DistributedDataParallel(mlp()) for _ in range(2))
    optimizers = []
    for model, make in ((one, lambda p: ZeRO(p, optim.SGD, lr=0.1)), (two, lambda p: optim.SGD(p, lr=0.1))):
        parameters = list(model.parameters())
        optimizer = make(parameters[:3])
        train(world, model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.add_param_group({"params": parameters[3:], "lr": 0.2, "momentum": 0.9})
        train(world, model, optimizer, 2)
        optimizers.append(optimizer)
    assert_equal(values(one), values(two))
    with pytest.raises(ValueError, match="appear"):
        optimizers[0].add_param_group({"params": list(one.parameters())[:1]})


def test_ranks_may_have_different_numbers_of_batches(world: World) -> None:
    ddp = dist.DistributedDataParallel(mlp())
    plain = dist.DistributedDataParallel(mlp())
    optimizer, whole = ZeRO(ddp.parameters(), optim.Adam, lr=0.01), optim.Adam(plain.parameters(), lr=0.01)
    for model, joinables, opt in ((ddp, [ddp, optimizer], optimizer), (plain, [plain], whole)):
        rng = np.random.default_rng(world.rank)
        with dist.Join(joinables):
            for _ in range(world.rank + 1):
                opt.zero_grad()
                step_of(model, *batch(rng, 3))
                opt.step()
    assert_same_bits_everywhere(values(ddp))
    assert_close(values(ddp), values(plain), rtol=1e-4)
