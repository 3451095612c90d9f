"""The content of a checkpoint, and resuming from it: to the same bits with as many ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from harness.configured import BATCH, BY_EPOCH, EPOCHS, configured, data

import mpiddp as dist
from mpiddp import nn
from mpiddp.optim import SGD
from mpiddp.training.build import build_trainer
from mpiddp.training.checkpoint import Checkpoint, read_checkpoint
from mpiddp.training.checkpointer import Checkpointer
from mpiddp.training.config import Config, UsageError
from mpiddp.training.ranks import raise_on_all_ranks
from mpiddp.training.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]

STEPS_AN_EPOCH = 8


def make(stop_after: int | None = None, **options) -> tuple[Trainer, Config]:
    config = configured(**options)
    trainer = build_trainer(config, data())
    if stop_after is not None:
        # As a signal would: on one rank, noticed by all.
        trainer.stop = lambda: dist.get_rank() == dist.get_world_size() - 1 and trainer.step + 1 == stop_after
    return trainer, config


def bits(trainer: Trainer) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in (trainer.arrays() | trainer.own_arrays()).items()}


def save(trainer: Trainer, config: Config, versions: dict[str, str] | None = None) -> None:
    checkpointer = Checkpointer(config, versions)
    checkpointer.save(trainer)
    raise_on_all_ranks(checkpointer.finish)


def timeless(trainer: Trainer) -> list:
    return [dataclasses.replace(m, epoch_s=0, test_s=0, samples_per_s=0, comm_exposed=0) for m in trainer.history]


def test_a_checkpoint_says_all_that_decides_how_training_goes_on(world, tmp_path):
    trainer, config = make(stop_after=STEPS_AN_EPOCH + 2, output=tmp_path)
    trainer.fit(EPOCHS)
    save(trainer, config, {"mpiddp": "1.2.3"})
    if world.rank:
        return
    state = read_checkpoint(tmp_path / "checkpoints" / "step-0000000010").state
    assert (state["epoch"], state["step"], state["skipped"]) == (1, 10, 0)
    assert state["loader"]["position"] == 2 * BATCH
    assert len(state["stateful"]) == world.size
    assert [each["epoch"] for each in state["history"]] == [1]
    assert state["running"][0] == 2 * BATCH and len(state["running"]) == 4, "samples, loss, correct, stop"
    assert state["param_groups"][0]["lr"] == 0.1 and sorted(state["bucket_order"]) == list(range(6))
    assert state["config"]["batch_size"] == BATCH and state["versions"] == {"mpiddp": "1.2.3"}
    assert {"ranks", "nodes", "BLAS threads", "NumPy", "MPI library", "machine", "MPIDDP_ALGORITHM"} <= set(
        state["bits"]
    )


@pytest.mark.parametrize("changed", [{"model": "net"}, {"seed": 4}, {"data": "synthetic"}, {"optimizer": "adam"}])
def test_checkpoint_of_another_problem_is_refused(world, tmp_path, changed):
    trainer, config = make(output=tmp_path, resume="auto")
    save(trainer, config)
    (name,) = changed
    with pytest.raises(UsageError, match=f"made with {name}="):
        Checkpointer(dataclasses.replace(config, **changed)).resume(trainer)


def test_checkpoint_that_does_not_fit_is_refused(world, tmp_path):
    trainer, config = make(output=tmp_path, resume="auto")
    save(trainer, config)
    with pytest.raises(UsageError, match=r"not one of this model and these data: Error\(s\) in loading"):
        Checkpointer(config).resume(make(model="net")[0])


@pytest.mark.parametrize("planned", [{"schedule": "cosine"}, {"schedule": BY_EPOCH}])
def test_schedule_of_another_batch_size_goes_on_at_its_epoch(world, planned):
    stopped, _ = make(epochs=4, **planned)
    stopped.fit(2)
    other = {"epochs": 4, "batch_size": 2 * BATCH, **planned}
    resumed, unbroken = make(**other)[0], make(**other)[0]
    resumed.load_state_dict(stopped.state_dict(), stopped.arrays())
    resumed.fit(4)
    unbroken.fit(4)
    assert [m.lr for m in resumed.history[2:]] == [m.lr for m in unbroken.history[2:]]


def test_damaged_checkpoint_is_skipped_with_a_warning(world, tmp_path, caplog):
    trainer, config = make(stop_after=2, output=tmp_path, resume="auto")
    checkpointer = Checkpointer(config)
    checkpointer.save(trainer)
    trainer.fit(1)
    checkpointer.save(trainer)
    raise_on_all_ranks(checkpointer.finish)
    damaged = tmp_path / "checkpoints" / "step-0000000002" / "arrays.safetensors"
    assert damaged.exists() == (world.rank == 0), "every rank has a folder of its own here"
    if world.rank == 0:
        damaged.write_bytes(damaged.read_bytes()[:-1])
    resumed, _ = make()
    Checkpointer(config).resume(resumed)
    assert resumed.step == 0
    said = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert len(said) == (world.rank == 0) and all(f"skipped a damaged checkpoint: {damaged}" in each for each in said)
    if world.rank == 0:
        damaged.with_name("state.json").unlink()
        (damaged.parents[1] / "step-0000000000" / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"no checkpoint in .* is whole \(.*mend that, or remove the folder"):
        Checkpointer(config).resume(resumed)


class Backwards(nn.Module):
    """Uses its layers in another order than it registers them, so that its buckets are rearranged."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(30, 10), nn.Linear(20, 30), nn.Linear(784, 20)

    def forward(self, x):
        x = self.middle(nn.functional.relu(self.first(x.reshape(len(x), -1))))
        return nn.functional.log_softmax(self.last(nn.functional.relu(x)), dim=1)


class Recorder:
    """A hook that sums a bucket in an order that depends on where in it a gradient lies, as MPI's own sums may."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def __call__(self, group, bucket):
        if bucket.index() == 0:
            self.sizes.append([])
        self.sizes[-1].append(bucket.buffer().size)
        buffer = bucket.buffer()
        buffer *= np.float32(1 / 3) ** (np.arange(buffer.size, dtype=np.float32) % 3)
        return dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=group, async_op=True)


def several_buckets(stop_after: int | None = None) -> tuple[Trainer, Recorder]:
    trainer, _ = make(stop_after)
    nn.manual_seed(3)
    trainer.model, recorder = dist.DistributedDataParallel(Backwards(), bucket_cap_mb=0.001), Recorder()
    trainer.model.register_comm_hook(None, recorder)
    trainer.optimizer = SGD(trainer.model.parameters(), lr=0.05, momentum=0.9)
    return trainer, recorder


@pytest.mark.parametrize("step", [1, STEPS_AN_EPOCH, 2 * STEPS_AN_EPOCH - 1])
def test_resumed_run_has_the_buckets_of_an_unbroken_one(world, tmp_path, step):
    unbroken, its = several_buckets()
    unbroken.fit(EPOCHS)
    assert len(its.sizes[0]) > 1 and its.sizes[1] != its.sizes[0], "rearranged after the first backward"
    stopped, _ = several_buckets(stop_after=step)
    assert stopped.state_dict()["bucket_order"] is None
    stopped.fit(EPOCHS)
    Checkpoint(stopped.arrays(), stopped.state_dict()).frozen().write(tmp_path / "c")
    read = read_checkpoint(tmp_path / "c")
    resumed, then = several_buckets()
    resumed.load_state_dict(read.state, read.arrays)
    resumed.fit(EPOCHS)
    assert then.sizes == its.sizes[step:]
    assert bits(resumed) == bits(unbroken) and timeless(resumed) == timeless(unbroken)
    forgotten, _ = several_buckets()
    forgotten.load_state_dict(read.state | {"bucket_order": None}, read.arrays)
    forgotten.fit(EPOCHS)
    assert bits(forgotten) != bits(unbroken), "or this test could not fail"


def test_order_of_another_model_is_refused(world):
    trainer, _ = several_buckets()
    for order in ([0, 1], [0, 1, 2, 3, 4, 4], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(ValueError, match="each of 6 trained parameters"):
            trainer.model.install_bucket_order(order)
