"""Training on devices, by the `Trainer`: the same numbers as on the host, and one wait for the device in a step."""

from typing import Any

import numpy as np
import pytest
from harness.inputs import dtype_of
from nn.test_nn_device import ONE_WAIT

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.data import ArrayDataset, DataLoader, GlobalBatchSampler
from mpiddp.training.build import agree_on_device
from mpiddp.training.config import Config, UsageError
from mpiddp.training.trainer import Trainer, _batches

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


def trainer(convert: Any = None, **options: Any) -> Trainer:
    nn.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    if convert is not None:
        model.convert(convert)
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((22, 6)).astype(np.float32), rng.integers(0, 4, 22)
    train = ArrayDataset(x, y)
    ddp = dist.DistributedDataParallel(model, bucket_cap_mb=1e-4)  # several buckets
    return Trainer(
        ddp,
        optim.SGD(ddp.module.parameters(), lr=0.1, momentum=0.9),
        DataLoader(train, batch_sampler=GlobalBatchSampler(train, 8, seed=1)),
        DataLoader(train, batch_sampler=GlobalBatchSampler(train, 8, shuffle=False)),
        Config(**options),
    )


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.3}, {"accumulate": 2}], ids=str)
def test_epochs_are_those_of_the_host(cupy: Any, options: dict[str, Any]) -> None:
    here, there = trainer(**options), trainer(cupy.asarray, **options)
    assert list(here.moments(2)) == list(there.moments(2))
    for one, other in zip(there.history, here.history, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.test_loss == pytest.approx(other.test_loss, rel=1e-5)
        assert one.accuracy == pytest.approx(other.accuracy)
    assert all(isinstance(p.data, cupy.ndarray) for p in there.model.module.parameters())


def test_a_step_waits_once(cupy: Any, waits: list[str]) -> None:
    made = trainer(cupy.asarray)
    for batch in _batches(made.train_loader):
        waits.clear()
        made._make_step(batch, iter(()))
        assert not made.skipped
        assert waits == ONE_WAIT, "communication asks events, and blocks nowhere"


def test_what_is_not_finite_is_named(cupy: Any) -> None:
    made = trainer(cupy.asarray)
    made.model.module[2].bias.data[0] = np.nan
    with pytest.raises(FloatingPointError, match="the loss is not finite on rank"):
        list(made.moments(1))
    made = trainer(cupy.asarray, on_nan="skip")
    before, seen = [p.data.get() for p in made.model.module.parameters()], []

    def twice_infinite(weight: Any) -> None:
        seen.append([p.data.get() for p in made.model.module.parameters()])
        weight.grad *= np.float32(np.inf if len(seen) < 3 else 1)

    weight = made.model.module[0].weight
    weight.post_accumulate_grad_hooks = {-1: twice_infinite, **weight.post_accumulate_grad_hooks}  # before DDP sends
    list(made.moments(1))
    assert made.skipped == 2 and len(seen) == 3
    assert all(np.array_equal(x, y) for each in seen for x, y in zip(each, before, strict=True))
    assert not np.array_equal(made.model.module[0].weight.data.get(), before[0]), "the third step is made"


@pytest.mark.mpi(min_size=2)
def test_ranks_agree_where_arrays_live(cupy: Any, world: Any, recwarn: pytest.WarningsRecorder) -> None:
    assert not agree_on_device("auto", "--device cpu")
    assert agree_on_device("auto", None) and agree_on_device("cuda", None)
    last = world.size - 1
    mine = "there is no driver" if world.rank == last else None
    assert not agree_on_device("auto", mine)
    said = f"rank {last} has no GPU: there is no driver"
    assert [said in str(each.message) for each in recwarn] == [True] * (world.rank == 0)
    with pytest.raises(UsageError) as error:
        agree_on_device("cuda", mine)
    assert str(error.value) == f"--device cuda: there is no driver (on rank {last})"


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        *(("float16", None), ("bfloat16", None)),
        *(("float32", dist.fp16_compress_hook), ("float32", dist.bf16_compress_hook)),
    ],
)
def test_half_precision_buckets(cupy: Any, world: Any, name: str, hook: Any) -> None:
    dtype = dtype_of(name)
    ddp = dist.DistributedDataParallel(nn.Linear(3, 2).convert(lambda x: cupy.asarray(x.astype(dtype))))
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    ddp(cupy.full((2, 3), world.rank + 1.0, dtype=dtype)).sum().backward()
    found = ddp.module.weight.grad
    assert isinstance(found, cupy.ndarray) and found.dtype == dtype
    np.testing.assert_allclose(found.get().astype(np.float32), np.full((2, 3), world.size + 1.0), rtol=2**-7)
