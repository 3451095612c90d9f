from typing import Any

import numpy as np
import pytest
from harness.learning import assert_close, assert_same_bits_everywhere, gradients, share
from harness.world import World

import mpiddp as dist
from mpiddp import nn
from mpiddp.autograd import Tensor
from mpiddp.nn import functional as F  # noqa: N812

pytestmark = pytest.mark.mpi

COUNTS = {
    "even": lambda rank, size: 3,
    "uneven": lambda rank, size: rank + 1,
    "empty": lambda rank, size: 4 if rank == size - 1 else 0,
    "one": lambda rank, size: 1,
}


def parts(world: World, kind: str) -> tuple[slice, int]:
    counts = [COUNTS[kind](rank, world.size) for rank in range(world.size)]
    start = sum(counts[: world.rank])
    return slice(start, start + counts[world.rank]), sum(counts)


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize(("shape", "momentum"), [((5,), 0.1), ((5, 7), 0.3), ((2, 3, 4), 0.1)], ids=str)
def test_forward_backward_and_statistics_are_those_of_the_joined_batch(
    world: World, kind: str, shape: tuple[int, ...], momentum: float
) -> None:
    mine, total = parts(world, kind)
    if total == 1 and len(shape) == 1:
        return
    channels = shape[0]
    plain_type = nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d
    plain: Any = plain_type(channels, momentum=momentum, dtype="float64")
    sync: Any = dist.SyncBatchNorm(channels, momentum=momentum, dtype="float64")
    for _ in range(2):
        x = 3 + 2 * world.rng.standard_normal((total, *shape))
        weights = world.rng.standard_normal(x.shape)
        whole, part = Tensor(x, requires_grad=True), Tensor(x[mine], requires_grad=True)
        plain.zero_grad(), sync.zero_grad()
        expected, found = plain(whole), sync(part)
        (expected * weights).sum().backward()
        (found * weights[mine]).sum().backward()
        np.testing.assert_allclose(found.data, expected.data[mine], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(part.grad, whole.grad[mine], rtol=1e-8, atol=1e-9)
        for name in ("running_mean", "running_var"):
            np.testing.assert_allclose(getattr(sync, name), getattr(plain, name), rtol=1e-9)
        assert sync.num_batches_tracked == plain.num_batches_tracked
        for p, q in zip(sync.parameters(), plain.parameters(), strict=True):
            total_gradient = p.grad.copy()
            dist.all_reduce(total_gradient)
            np.testing.assert_allclose(total_gradient, q.grad, rtol=1e-8, atol=1e-9)
    assert_same_bits_everywhere({"mean": sync.running_mean, "var": sync.running_var})


def test_statistics_far_from_zero_keep_their_digits(world: World) -> None:
    sync = dist.SyncBatchNorm(1, momentum=1.0)
    x = (10_000 + world.rng.standard_normal((64 * world.size, 1))).astype(np.float32)
    sync(share(x, world.rank, world.size))
    np.testing.assert_allclose(sync.running_var, x.astype(np.float64).var(axis=0, ddof=1), rtol=1e-3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(4)
        self.conv, self.norm, self.inner = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3))
        self.last = nn.Linear(3 * 4 * 4, 2)

    def forward(self, x: Any) -> Any:
        return self.last(self.inner(self.norm(self.conv(x)).tanh()).flatten(1))


def test_a_converted_model_under_ddp_trains_as_one_process_does(world: World) -> None:
    alone = Net()
    converted = dist.SyncBatchNorm.convert_sync_batchnorm(Net())
    assert [type(m).__name__ for m in converted.modules()].count("SyncBatchNorm") == 2
    ddp = dist.DistributedDataParallel(converted)
    for step in range(3):
        counts = [3 * ((rank + step) % 2) for rank in range(world.size)] if world.size > 1 else [3]
        start = sum(counts[: world.rank])
        mine = slice(start, start + counts[world.rank])
        x = world.rng.standard_normal((sum(counts), 1, 6, 6)).astype(np.float32)
        y = world.rng.integers(0, 2, sum(counts))
        alone.zero_grad(), ddp.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        with ddp.weighted(counts[world.rank], sum(counts)), np.errstate(all="ignore"):
            F.cross_entropy(ddp(x[mine]), y[mine]).backward()
        assert_close(gradients(converted), gradients(alone), rtol=1e-3, atol=1e-5)
        assert_same_bits_everywhere(dict(ddp.named_buffers()))
    for mine_, theirs in zip(converted.buffers(), alone.buffers(), strict=True):
        np.testing.assert_allclose(mine_, theirs, rtol=1e-4, atol=1e-6)


def test_conversion_keeps_parameters_buffers_and_mode() -> None:
    plain = nn.BatchNorm1d(4, eps=1e-3, momentum=0.3).eval()
    plain.running_mean[...] = 3
    sync: Any = dist.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert isinstance(sync, dist.SyncBatchNorm) and not sync.training
    assert sync.weight is plain.weight and sync.running_mean is plain.running_mean
    assert (sync.eps, sync.momentum) == (1e-3, 0.3)
    assert dist.SyncBatchNorm.convert_sync_batchnorm(sync) is sync


def test_evaluation_communicates_nothing(world: World) -> None:
    sync = dist.SyncBatchNorm(3).eval()
    if world.rank == 0:
        assert sync(np.ones((2, 3), np.float32)).shape == (2, 3)


def test_only_the_ranks_of_its_group_count(world: World) -> None:
    group = dist.new_group([0])
    if world.rank == 0:
        x = world.rng.standard_normal((4, 3)).astype(np.float32)
        found = dist.SyncBatchNorm(3, process_group=group)(x)
        np.testing.assert_allclose(found.data, nn.BatchNorm1d(3)(x).data, rtol=1e-5, atol=1e-6)
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)


def test_what_cannot_be_normalised_is_refused_on_every_rank(world: World) -> None:
    with pytest.raises(ValueError, match="at least 2D input"):
        dist.SyncBatchNorm(3)(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="non-zero"):
        dist.SyncBatchNorm(0)(np.ones((3, 0), np.float32))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        dist.SyncBatchNorm(3)(np.ones((int(world.rank == 0), 3), np.float32))
    with pytest.raises(TypeError, match="needs a group made by new_group, or None for all ranks, got 3"):
        dist.SyncBatchNorm(3, process_group=3)  # type: ignore[arg-type]
