"""Resuming from a checkpoint: to the same bits with as many ranks, whoever has written it and wherever it stopped."""

import dataclasses

import numpy as np
import pytest
from harness.configured import BATCH, BY_EPOCH, EPOCHS, configured, data, rate

import mpiddp as dist
from mpiddp import nn
from mpiddp.optim import SGD, AdamW
from mpiddp.serialization import flatten
from mpiddp.training import checkpointer as checkpointer_module
from mpiddp.training.build import build_trainer
from mpiddp.training.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from mpiddp.training.checkpointer import Checkpointer
from mpiddp.training.config import Config
from mpiddp.training.options import RunError, UsageError
from mpiddp.training.trainer import Trainer

from .test_options import powersgd

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
    return {name: x.tobytes() for name, x in flatten(trainer.state_dict() | {"own": trainer.own_state()})[1].items()}


def save(trainer: Trainer, config: Config, versions: dict[str, str] | None = None) -> None:
    checkpointer = Checkpointer(config, versions)
    checkpointer.save(trainer)
    checkpointer.finish()


def timeless(trainer: Trainer) -> list:
    return [dataclasses.replace(m, epoch_s=0, test_s=0, samples_per_s=0, comm_exposed=0) for m in trainer.history]


@pytest.mark.parametrize("changed", [{"model": "net"}, {"seed": 4}, {"data": "synthetic"}, {"optimizer": "adam"}])
def test_checkpoint_of_another_problem_is_refused(world, tmp_path, changed):
    trainer, config = make(output=tmp_path, resume="auto")
    save(trainer, config, {"mpiddp": "1.2.3"})
    if world.rank == 0:
        written = read_checkpoint(tmp_path / "checkpoints" / "step-0000000000.safetensors").state
        assert written["versions"] == {"mpiddp": "1.2.3"}
    (name,) = changed
    with pytest.raises(UsageError, match=f"made with {name}="):
        Checkpointer(dataclasses.replace(config, **changed)).resume(trainer)


def test_checkpoint_that_does_not_fit_is_refused(world, tmp_path):
    trainer, config = make(output=tmp_path, resume="auto")
    save(trainer, config)
    with pytest.raises(UsageError, match=r"not one of this model and these data: Error\(s\) in loading"):
        Checkpointer(config).resume(make(model="net")[0])


class Counting(SGD):
    """An optimizer whose state has more than SGD's."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)

    def state_dict(self):
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.steps = state_dict["steps"]


def test_an_optimizer_saves_its_state_by_itself(world, tmp_path):
    trainer, config = make(output=tmp_path, resume="auto")
    trainer.optimizer = Counting(trainer.model.parameters(), lr=0.1)
    list(trainer.moments(1))
    save(trainer, config)
    resumed, _ = make()
    resumed.optimizer = Counting(resumed.model.parameters(), lr=0.1)
    Checkpointer(config).resume(resumed)
    assert resumed.optimizer.steps == STEPS_AN_EPOCH


@pytest.mark.parametrize("planned", [{"schedule": "cosine"}, {"schedule": BY_EPOCH}])
def test_schedule_of_another_batch_size_goes_on_at_its_epoch(world, planned):
    stopped, _ = make(epochs=4, **planned)
    list(stopped.moments(2))
    other = {"epochs": 4, "batch_size": 2 * BATCH, **planned}
    resumed, unbroken = make(**other)[0], make(**other)[0]
    resumed.load_state_dict(stopped.state_dict())
    list(resumed.moments(4))
    list(unbroken.moments(4))
    assert [m.lr for m in resumed.history[2:]] == [m.lr for m in unbroken.history[2:]]


def test_damaged_checkpoint_is_skipped_with_a_warning(world, tmp_path, caplog):
    trainer, config = make(stop_after=2, output=tmp_path, resume="auto")
    checkpointer = Checkpointer(config)
    checkpointer.save(trainer)
    list(trainer.moments(1))
    checkpointer.save(trainer)
    checkpointer.finish()
    damaged = tmp_path / "checkpoints" / "step-0000000002.safetensors"
    assert damaged.exists() == (world.rank == 0), "every rank has a folder of its own here"
    if world.rank == 0:
        damaged.write_bytes(damaged.read_bytes()[:-1])
    resumed, _ = make()
    Checkpointer(config).resume(resumed)
    assert resumed.step == 0
    said = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert len(said) == (world.rank == 0) and all(f"skipped a damaged checkpoint: {damaged}" in each for each in said)
    if world.rank == 0:
        damaged.with_name("step-0000000000.safetensors").write_bytes(b"")
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


def several_buckets(stop_after: int | None = None) -> tuple[Trainer, list[list[int]]]:
    """Return a trainer, and the sizes of each step's buckets."""
    sizes: list[list[int]] = []

    def sum_by_place(group, bucket):
        """Sum in an order that depends on where in the bucket a gradient lies, as MPI's own sums may."""
        if bucket.index() == 0:
            sizes.append([])
        buffer = bucket.buffer()
        sizes[-1].append(buffer.size)
        buffer *= np.float32(1 / 3) ** (np.arange(buffer.size, dtype=np.float32) % 3)
        return dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=group, async_op=True)

    trainer, _ = make(stop_after)
    nn.manual_seed(3)
    trainer.model = dist.DistributedDataParallel(Backwards(), bucket_cap_mb=0.001)
    trainer.model.register_comm_hook(None, sum_by_place)
    trainer.optimizer = SGD(trainer.model.parameters(), lr=0.05, momentum=0.9)
    return trainer, sizes


@pytest.mark.parametrize("step", [1, STEPS_AN_EPOCH, 2 * STEPS_AN_EPOCH - 1])
def test_resumed_run_has_the_buckets_of_an_unbroken_one(world, tmp_path, step):
    unbroken, its = several_buckets()
    list(unbroken.moments(EPOCHS))
    assert len(its[0]) > 1 and its[1] != its[0], "rearranged after the first backward"
    stopped, _ = several_buckets(stop_after=step)
    assert stopped.state_dict()["bucket_order"] is None
    list(stopped.moments(EPOCHS))
    Checkpoint(stopped.state_dict()).frozen().write(tmp_path / "c")
    read = read_checkpoint(tmp_path / "c")
    resumed, then = several_buckets()
    resumed.load_state_dict(read.state)
    list(resumed.moments(EPOCHS))
    assert then == its[step:]
    assert bits(resumed) == bits(unbroken) and timeless(resumed) == timeless(unbroken)
    forgotten, _ = several_buckets()
    forgotten.load_state_dict(read.state | {"bucket_order": None})
    list(forgotten.moments(EPOCHS))
    assert bits(forgotten) != bits(unbroken), "or this test could not fail"


def test_order_of_another_model_is_refused(world):
    trainer, _ = several_buckets()
    for order in ([0, 1], [0, 1, 2, 3, 4, 4], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(ValueError, match="each of 6 trained parameters"):
            trainer.model.install_bucket_order(order)


RESUMED = {
    "schedule": {"schedule": "cosine", "warmup_steps": 2, "accumulate": 3, "clip_norm": 0.5, "dropout": 0.3},
    "zero, adam": {"zero": True, "optimizer": "adam", "lr": 0.001, "accumulate": 2},
    "own hook and schedule": {"average": f"{powersgd.__module__}:powersgd", "schedule": BY_EPOCH, "accumulate": 2},
    "batch norm of all ranks, zero": {"model": "resnet", "sync_batchnorm": True, "zero": True, "accumulate": 3},
    "batch norm of each rank": {"model": "resnet", "accumulate": 3},
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_stopped_in_a_window_goes_on_to_the_same_bits(world, folder, name):
    config = configured(**RESUMED[name], output=folder, resume="auto")
    unbroken = build_trainer(config, data())
    list(unbroken.moments(EPOCHS))

    stopped = build_trainer(config, data())
    loss_fn, asked = stopped.loss_fn, []

    def counted(output, y):
        asked.append(stopped.step)
        return loss_fn(output, y)

    # As a signal that comes to one rank while the first batch of its window runs: rank 0 has a sample in every batch.
    stopped.loss_fn = counted
    at = {1: 6, 2: 4, 3: 3}[config.accumulate]
    stopped.stop = lambda: world.rank == 0 and at in asked
    list(stopped.moments(EPOCHS))
    # A step of one batch begins with the question, so there the signal came behind it.
    reached = at + 1 + (config.accumulate == 1)
    assert stopped.stopped and stopped.step == reached
    save(stopped, config)

    nn.manual_seed(99)
    resumed = build_trainer(config, data())
    Checkpointer(config).resume(resumed)
    assert resumed.step == reached
    list(resumed.moments(EPOCHS))
    assert resumed.step == unbroken.step and resumed.skipped == unbroken.skipped
    assert resumed.history[-1].lr == unbroken.history[-1].lr
    assert bits(resumed) == bits(unbroken)
    assert bits(stopped) != bits(unbroken), "or this test could not fail"


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"weight_decay": 0.1}, {"epochs": 4, "lr": 0.4, "weight_decay": 0.2, "momentum": 0.5}),
        ({"warmup_steps": 2}, {"schedule": "constant", "warmup_steps": 0}),
    ],
)
def test_a_changed_plan_holds_from_the_step_that_was_reached(world, folder, options, changed):
    options = {"schedule": "cosine", "output": folder, "resume": "auto", **options}
    trainer, config = make(**options)
    resumed, other = make(**options | changed)
    list(trainer.moments(1))
    save(trainer, config)
    Checkpointer(other).resume(resumed)
    (group,) = resumed.optimizer.param_groups
    expected = rate(other, 8, 8 * other.epochs)
    assert group["lr"] == pytest.approx(expected) and expected != pytest.approx(rate(config, 8, 16))
    assert (group["weight_decay"], group["momentum"]) == (other.weight_decay, other.momentum)


class Memory:
    """A communication hook's memory, as PowerSGD's: other arrays on every rank, that change with every step."""

    def __init__(self) -> None:
        self.iter = 0
        self.error_dict: dict[int, np.ndarray] = {}

    def change(self) -> None:
        self.iter += 1
        self.error_dict[0] = np.full(3, 10.0 * dist.get_rank() + self.iter)

    def state_dict(self):
        return {"iter": self.iter, "error_dict": self.error_dict}

    def load_state_dict(self, state) -> None:
        self.iter, self.error_dict = state["iter"], state["error_dict"]


def make_sharded(config, sharded=True, stop_after=None):
    trainer = build_trainer(config, data())
    parameters = trainer.model.module.parameters()
    options = {"lr": 1e-2, "betas": (0.8, 0.9)}
    trainer.optimizer = (
        dist.ZeroRedundancyOptimizer(parameters, AdamW, **options) if sharded else AdamW(parameters, **options)
    )
    memory = Memory()
    trainer.compression = memory

    def stop() -> bool:
        memory.change()
        return trainer.step + 1 == stop_after

    trainer.stop = stop
    return trainer, memory


def train_and_save(config, sharded=True):
    trainer, _ = make_sharded(config, sharded, stop_after=4)
    list(trainer.moments(2))
    save(trainer, config)


def model_bits(trainer):
    return {name: x for name, x in bits(trainer).items() if name.startswith("model.")}


def config_in(folder, **options):
    return configured(output=folder, resume="auto", **options)


def test_owners_write_their_shards(world, folder):
    config = config_in(folder)
    train_and_save(config)
    read = read_checkpoint(CheckpointStore(folder / "checkpoints").path(4))
    assert not read.state["optimizer"]["state"]
    assert sorted(read.shards) == list(range(world.size))
    trainer, _ = make_sharded(config)
    for rank, shard in read.shards.items():
        numbers = set(shard["optimizer"])
        assert (numbers == set(trainer.optimizer.owned())) == (rank == world.rank) or world.size == 1
        assert shard["compression"]["error_dict"][0].tolist() == [10 * rank + 4] * 3
        assert all(len(record) == 3 for record in shard["optimizer"].values()), "two moments and a count of steps"
    everything = [number for shard in read.shards.values() for number in shard["optimizer"]]
    assert sorted(everything) == list(range(len(list(trainer.model.module.parameters()))))
    assert not [path for path in (folder / "checkpoints").rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_resumed_run_has_the_bits_of_an_unbroken_one(world, folder, before, after):
    config = config_in(folder)
    unbroken, memory = make_sharded(config, sharded=False)
    list(unbroken.moments(2))
    train_and_save(config, sharded=before)
    resumed, its = make_sharded(config, sharded=after)
    Checkpointer(config).resume(resumed)
    assert resumed.step == its.iter == 4 and its.error_dict[0].tolist() == [10 * world.rank + 4] * 3
    list(resumed.moments(2))
    assert model_bits(resumed) == model_bits(unbroken)
    assert its.iter == memory.iter and np.array_equal(its.error_dict[0], memory.error_dict[0])


@pytest.mark.parametrize("then", [1, 5])
def test_shards_of_another_number_of_ranks(world, folder, then):
    """The shards of `then` ranks are made here of a whole state, in an order of their own."""
    config = config_in(folder)
    stopped, _ = make_sharded(config, sharded=False, stop_after=4)
    list(stopped.moments(2))
    state, compression = stopped.state_dict(), stopped.own_state()["compression"]
    records = state["optimizer"]["state"]
    shards = [
        {
            "optimizer": {number: record for number, record in records.items() if number % then == rank},
            "compression": compression | {"error_dict": {0: np.full(3, float(rank))}},
        }
        for rank in range(then)
    ]
    state |= {"config": config.as_dict(), "bits": {"ranks": then}, "optimizer": state["optimizer"] | {"state": {}}}
    made = dataclasses.replace(Checkpoint(state).frozen(), shards=dict(enumerate(shards)))
    resumed, memory = make_sharded(config)
    checkpointer = Checkpointer(config)
    checkpointer._newest = lambda: made if world.rank == 0 else None
    checkpointer.resume(resumed)
    assert memory.error_dict[0].tolist() == [world.rank % then] * 3
    found = resumed.optimizer.shard()
    assert set(found) == set(resumed.optimizer.owned())
    for number, record in found.items():
        for name, x in record.items():
            assert np.array_equal(x, records[number][name]), (number, name)


def test_a_shard_that_cannot_be_written_costs_a_checkpoint_and_not_the_run(world, folder, caplog, monkeypatch):
    config = config_in(folder)
    trainer, _ = make_sharded(config, stop_after=3)
    list(trainer.moments(1))
    checkpointer = Checkpointer(config)
    last = world.size - 1

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if world.rank == last:
            patch.setattr(checkpointer_module, "write_shard", fail)
        checkpointer.save(trainer)
        trainer.step += 1
        checkpointer.save(trainer)  # hears of the one before
        said = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
        assert len(said) == (world.rank == 0) and all(f"rank {last}: [Errno 28] No space left" in text for text in said)
        with pytest.raises(RunError, match=rf"could not be written \(rank {last}: .*No space left"):
            checkpointer.finish()
    if world.rank == 0:
        assert not list((folder / "checkpoints").glob("*")), "the other ranks' shards would fill the disk"
    trainer.step += 1
    checkpointer.save(trainer)
    checkpointer.finish()
    if world.rank == 0:
        assert {path.name.partition(".")[0] for path in (folder / "checkpoints").iterdir()} == {"step-0000000005"}
    dist.barrier()


def test_of_two_checkpoints_in_a_row_each_has_its_own_shards(world, folder):
    """The next one begins while the first is completed, under the same name when an epoch ends with a step's."""
    config = config_in(folder, keep=9)
    trainer, memory = make_sharded(config, stop_after=3)
    list(trainer.moments(1))
    checkpointer = Checkpointer(config)
    for moment in range(8):
        memory.error_dict[0] = np.full(3, 100.0 * moment + world.rank)
        trainer.step += moment % 2
        trainer.epoch += 1
        checkpointer.save(trainer)
    checkpointer.finish()
    for step, moment in ((4, 2), (5, 4), (6, 6), (7, 7)):
        read = read_checkpoint(CheckpointStore(folder / "checkpoints").path(step))
        found = {rank: shard["compression"]["error_dict"][0][0] for rank, shard in read.shards.items()}
        assert found == {rank: 100.0 * moment + rank for rank in range(world.size)}, step
