"""Ranks with different numbers of batches: DDP.join against torch, and the generic Join."""

from typing import Any

import numpy as np
import pytest
from harness.learning import assert_same_bits_everywhere, batch, gloo, mlp, scale, step_of, torch_mlp, values
from harness.world import World

import mpiddp as dist
from mpiddp import nn, optim

from .test_replicas import Normed

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel


def inputs_of(rank: int, size: int, kind: str) -> int:
    return {"rising": rank + 1, "falling": size - rank, "none": 2 * (rank == size - 1), "equal": 2}[kind]


@pytest.mark.parametrize("by_all", [True, False])
def test_gradients_are_divided_by_all_or_by_those_with_inputs(world: World, by_all: bool) -> None:
    ddp = DDP(scale())
    found = []
    with ddp.join(divide_by_initial_world_size=by_all):
        for _ in range(world.rank + 1):
            ddp.zero_grad()
            ddp(1.0).backward()
            found.append(float(ddp.module.w.grad[0]))
    expected = [(world.size - step) / world.size if by_all else 1.0 for step in range(world.rank + 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    ddp.zero_grad()
    ddp(float(world.rank)).backward()  # afterwards all count again
    np.testing.assert_allclose(ddp.module.w.grad, (world.size - 1) / 2, rtol=1e-6)


@pytest.mark.parametrize(("kind", "by_all"), [("rising", True), ("falling", False), ("none", False)])
def test_training_is_that_of_torch(world: World, kind: str, by_all: bool) -> None:
    torch = gloo()
    model = mlp()
    theirs = torch.nn.parallel.DistributedDataParallel(torch_mlp(torch, model))
    ours = DDP(model)
    optimizer = optim.SGD(ours.parameters(), lr=0.1)
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    rng = np.random.default_rng(world.rank)
    parts = [batch(rng, 3) for _ in range(inputs_of(world.rank, world.size, kind))]
    with ours.join(by_all):
        for x, y in parts:
            optimizer.zero_grad()
            step_of(ours, x, y)
            optimizer.step()
    with theirs.join(by_all):
        for x, y in parts:
            their_optimizer.zero_grad()
            torch.nn.functional.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(y)).backward()
            their_optimizer.step()
    assert_same_bits_everywhere(values(ours))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(p.data, q.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"static_graph": True}, {"bucket_cap_mb": 0.0001}, "hook"], ids=str
)
def test_every_option_goes_with_it(world: World, options: Any) -> None:
    ddp = DDP(Normed(), **({} if options == "hook" else options))
    if options == "hook":
        ddp.register_comm_hook(None, dist.allreduce_hook)
    optimizer = optim.SGD(ddp.parameters(), lr=0.1)
    rng = np.random.default_rng(world.rank)
    for _ in range(2):  # twice: both epochs leave all ranks in step
        with ddp.join():
            for step in range(2 * world.rank + 2):
                x, y = batch(rng, 3)
                if step % 2 == 0:
                    with ddp.no_sync():
                        step_of(ddp, x, y)
                else:
                    step_of(ddp, x, y)
                    optimizer.step()
                    optimizer.zero_grad()
        assert_same_bits_everywhere(values(ddp))
        assert_same_bits_everywhere(dict(ddp.named_buffers()))
        ddp.check_replicas()
    optimizer.zero_grad()
    step_of(ddp, *batch(rng, 3))
    assert_same_bits_everywhere({name: p.grad for name, p in ddp.named_parameters()})


@pytest.mark.mpi(min_size=2)
def test_early_termination_is_an_error_everywhere(world: World) -> None:
    ddp = DDP(mlp())
    text = "Rank 0 exhausted all inputs." if world.rank == 0 else "Detected at least one rank that exhausted inputs"
    with pytest.raises(RuntimeError, match=text), ddp.join(throw_on_early_termination=True):
        for _ in range(2 + (world.rank > 0)):
            step_of(ddp, *batch(world.rng, 3))
    with ddp.join(throw_on_early_termination=True):
        step_of(ddp, *batch(world.rng, 3))


def test_disabled_it_does_nothing(world: World) -> None:
    ddp = DDP(mlp())
    with ddp.join(enable=False):
        step_of(ddp, *batch(world.rng, 3))
    with pytest.raises(KeyError), ddp.join():
        raise KeyError  # the error passes, and nobody waits


def test_weighted_and_join_exclude_each_other(world: World) -> None:
    ddp = DDP(mlp())
    with pytest.raises(RuntimeError, match="use it or join"), ddp.join(), ddp.weighted(1):
        pass


def test_what_a_rank_without_inputs_cannot_follow_is_refused(world: World) -> None:
    normed = DDP(nn.Sequential(nn.Linear(5, 3), dist.SyncBatchNorm(3)))
    with pytest.raises(RuntimeError, match="SyncBatchNorm"):
        normed.join()


class Counter(dist.Joinable):
    """Torch's tutorial: counts the inputs of all ranks."""

    def __init__(self) -> None:
        self.total = 0
        self.ended = ""

    def __call__(self) -> None:
        work = dist.Join.notify_join_context(self)
        if work is not None:
            work.wait()
        self.count(1)

    def count(self, mine: int) -> None:
        x = np.array([mine])
        dist.all_reduce(x)
        self.total += int(x[0])

    def join_hook(self, **kwargs: Any) -> dist.JoinHook:
        counter = self

        class Hook(dist.JoinHook):
            def main_hook(self) -> None:
                counter.count(0)

            def post_hook(self, is_last_joiner: bool) -> None:
                counter.ended += f"{kwargs['word']} {is_last_joiner}"

        return Hook()

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


def test_several_joinables_share_one_announcement(world: World) -> None:
    one, two = Counter(), Counter()
    with dist.Join([one, two], word="last"):
        for _ in range(world.rank + 1):
            one()
            two()
    expected = world.size * (world.size + 1) // 2
    assert one.total == two.total == expected
    assert one.ended == f"last {world.rank == world.size - 1}"


def test_joinables_are_needed_and_of_one_group(world: World) -> None:
    with pytest.raises(ValueError, match="at least one joinable"):
        dist.Join([])
    group = dist.new_group(list(range(world.size)))
    with pytest.raises(ValueError, match="multiple process groups"):
        dist.Join([DDP(mlp()), DDP(mlp(), process_group=group)])
    dist.destroy_process_group(group)
