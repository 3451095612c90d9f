"""State that DistributedDataParallel keeps alike on all ranks: first values and buffers."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.learning import (
    assert_equal,
    assert_same_bits_everywhere,
    batch,
    gradients,
    mine,
    mlp,
    step_of,
    twin,
    values,
)
from harness.world import World, everybody

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import Tensor, no_grad

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(2)
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def test_a_buffer_with_gaps_is_copied_and_the_gaps_are_not(world: World) -> None:
    whole, model = np.arange(10.0) + world.rank, Normed()
    model.register_buffer("gaps", whole[::2])
    DDP(model)
    assert whole[::2].tolist() == [0, 2, 4, 6, 8] and whole[1::2].tolist() == [x + world.rank for x in (1, 3, 5, 7, 9)]


@pytest.mark.parametrize(
    ("options", "synchronised"),
    [({}, True), ({"broadcast_buffers": False}, False), ({"forward_sync_buffers": False}, False)],
    ids=str,
)
def test_buffers_follow_the_first_rank_at_the_next_forward(
    world: World, options: dict[str, Any], synchronised: bool
) -> None:
    ddp = DDP(Normed(), **options)
    norm = ddp.module.norm
    for _ in range(2):
        step_of(ddp, *batch(np.random.default_rng(world.rank), 6))
    here = [b.copy() for b in ddp.buffers()]
    if world.rank == 0:
        with no_grad():  # an evaluation communicates nothing, so one rank may evaluate alone
            assert not ddp.eval()(np.ones((2, 5), np.float32)).requires_grad
        ddp.train()
    assert_equal(dict(enumerate(here)), dict(enumerate(ddp.buffers())))
    before = twin(ddp.module)
    means = everybody(before.norm.running_mean)
    ddp(np.ones((2, 5), np.float32))
    before.norm.running_mean[...] = means[0 if synchronised else world.rank]
    before(np.ones((2, 5), np.float32))
    np.testing.assert_allclose(norm.running_mean, before.norm.running_mean, rtol=1e-6)
    assert (len({x.tobytes() for x in means}) == 1) == (world.size == 1)


@pytest.mark.parametrize("init_sync", [True, False])
def test_construction_copies_parameters_and_buffers_of_the_first_rank(world: World, init_sync: bool) -> None:
    model, expected = Normed(), Normed()
    for each in (model,) if init_sync else (model, expected):
        for array in (*(parameter.data for parameter in each.parameters()), *each.buffers()):
            array += world.rank
    ddp = DDP(model, init_sync=init_sync)
    assert_equal(values(ddp.module), values(expected))
    assert_equal(dict(ddp.module.named_buffers()), dict(expected.named_buffers()))
    assert model.norm.num_batches_tracked.shape == ()


def test_evaluation_mode_with_gradients_reduces_as_in_torch(world: World) -> None:
    ddp = DDP(Normed()).eval()
    step_of(ddp, *mine(world, *batch(world.rng, 2 * world.size)))
    assert_same_bits_everywhere(gradients(ddp))
    assert ddp._reducer.backwards == 1


def test_state_has_the_prefix_and_loads(world: World) -> None:
    ddp, other = DDP(mlp(seed=1)), DDP(mlp(seed=2))
    assert list(ddp.state_dict()) == ["module." + name for name in mlp().state_dict()]
    step_of(other, *batch(world.rng, 3))
    other.load_state_dict(ddp.state_dict())
    assert_equal(values(ddp), values(other))
    assert other.module[0].weight.data.base is other.module[2].weight.data.base


def frozen() -> nn.Module:
    model = mlp()
    model[2].bias.requires_grad = False
    return model


OTHERS = {
    "count": lambda: mlp((5, 3)),
    "shape": lambda: mlp((5, 8, 6, 3)),
    "dtype": lambda: mlp(dtype="float64"),
    "name": lambda: nn.Sequential(OrderedDict((f"l{i}", layer) for i, layer in enumerate(mlp()))),
    "frozen": frozen,
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("difference", OTHERS)
def test_models_that_differ_are_an_error_on_every_rank(world: World, difference: str) -> None:
    model = OTHERS[difference]() if world.rank == world.size - 1 else mlp()
    for init_sync in (True, False):
        with pytest.raises(RuntimeError, match="DDP expects same model across all ranks") as caught:
            DDP(model, init_sync=init_sync)
        assert f"{world.size - 1}" in str(caught.value)
    assert ("2.bias of float32 (6,) with requires_grad=False on rank" in str(caught.value)) == (difference == "frozen")


@pytest.mark.mpi(min_size=2)
def test_options_that_differ_are_an_error_on_every_rank(world: World) -> None:
    """Ranks that cut their buckets elsewhere would sum other parameters."""
    last = world.size - 1
    match = rf"the same options, but bucket_cap_mb is 25 on rank 0 and 1 on rank {last}"
    with pytest.raises(RuntimeError, match=match):
        DDP(mlp(), bucket_cap_mb=1 if world.rank == last else 25)


@pytest.mark.mpi(min_size=2)
def test_replicas_that_drift_are_found(world: World) -> None:
    ddp = DDP(mlp())
    ddp.check_replicas()
    if world.rank == 1:
        ddp.module[2].bias.data[0] += 1
    with pytest.raises(dist.MismatchError, match=r"2\.bias.* rank 1\b"):
        ddp.check_replicas()


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_wrapper_that_is_copied_says_what_to_copy(world: World, way: Callable[[Any], object]) -> None:
    with pytest.raises(RuntimeError, match=r"copy or pickle ddp\.module, and wrap the copy"):
        way(DDP(mlp()))


def test_a_model_that_is_let_go_is_local_again(world: World) -> None:
    model, alone = mlp(), mlp()
    first = DDP(model)
    first.detach()
    x, y = batch(np.random.default_rng(world.rank), 3)
    step_of(first, x, y), step_of(alone, x, y)
    assert_equal(gradients(model), gradients(alone))
    assert all(p.grad_slot is None and not p.post_accumulate_grad_hooks for p in model.parameters())
    second = DDP(model)
    second.zero_grad()
    step_of(second, x, y)
    assert_same_bits_everywhere(gradients(model))


@pytest.mark.mpi(min_size=2)
def test_a_check_on_one_rank_beside_a_construction_on_others(world: World) -> None:
    ddp = DDP(mlp())
    text = r"rank . calls (check_replicas|DistributedDataParallel).*, rank . calls (check|Distr)"
    with pytest.raises(dist.MismatchError, match=text):
        ddp.check_replicas() if world.rank == 0 else DDP(mlp())
