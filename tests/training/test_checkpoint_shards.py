"""Shards of checkpoints are written by the ranks that hold them: sharded optimizers, memories of single ranks."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
from harness.configured import configured, data

import mpiddp as dist
from mpiddp.optim import AdamW
from mpiddp.training import checkpointer as checkpointer_module
from mpiddp.training.build import build_trainer
from mpiddp.training.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from mpiddp.training.checkpointer import Checkpointer
from mpiddp.training.ranks import raise_on_all_ranks

from .test_checkpointer import bits, save

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


class Memory:
    """A communication hook's memory, as PowerSGD's: other arrays on every rank, that change with every step."""

    def __init__(self) -> None:
        self.iter = 0
        self.error_dict: dict[int, np.ndarray] = {}

    def __call__(self, trainer) -> None:
        self.iter += 1
        self.error_dict[0] = np.full(3, 10.0 * dist.get_rank() + self.iter)

    def state_dict(self):
        return {"iter": self.iter, "error_dict": self.error_dict}

    def load_state_dict(self, state) -> None:
        self.iter, self.error_dict = state["iter"], state["error_dict"]


def make(config, sharded=True, stop_after=None):
    trainer = build_trainer(config, data())
    parameters = trainer.model.module.parameters()
    options = {"lr": 1e-2, "betas": (0.8, 0.9)}
    trainer.optimizer = (
        dist.ZeroRedundancyOptimizer(parameters, AdamW, **options) if sharded else AdamW(parameters, **options)
    )
    memory = Memory()
    trainer.stateful["memory"] = memory
    trainer.callbacks["step_end"].append(memory)
    if stop_after is not None:
        trainer.stop = lambda: trainer.step + 1 == stop_after
    return trainer, memory


def train_and_save(config, sharded=True):
    trainer, _ = make(config, sharded, stop_after=4)
    trainer.fit(2)
    save(trainer, config)


def model_bits(trainer):
    return {name: x for name, x in bits(trainer).items() if name.startswith("model.")}


def config_in(folder, **options):
    return configured(output=folder, resume="auto", **options)


def test_owners_write_their_shards(world, folder):
    config = config_in(folder)
    train_and_save(config)
    read = read_checkpoint(CheckpointStore(folder / "checkpoints").path(4))
    assert not [name for name in read.arrays if name.startswith("optimizer.")]
    assert sorted(read.shards) == list(range(world.size))
    trainer, _ = make(config)
    for rank, shard in read.shards.items():
        numbers = {int(name.split(".")[1]) for name in shard if name.startswith("optimizer.")}
        assert (numbers == set(trainer.optimizer.owned())) == (rank == world.rank) or world.size == 1
        assert shard["stateful.memory.error_dict.0"].tolist() == [10 * rank + 4] * 3
    everything = [name for shard in read.shards.values() for name in shard if name.startswith("optimizer.")]
    parameters = len(list(trainer.model.module.parameters()))
    assert len(everything) == len(set(everything)) == 3 * parameters, "two moments and a count of steps each, once"
    assert not [path for path in (folder / "checkpoints").rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_resumed_run_has_the_bits_of_an_unbroken_one(world, folder, before, after):
    config = config_in(folder)
    unbroken, memory = make(config, sharded=False)
    unbroken.fit(2)
    train_and_save(config, sharded=before)
    resumed, its = make(config, sharded=after)
    Checkpointer(config).resume(resumed)
    assert resumed.step == its.iter == 4 and its.error_dict[0].tolist() == [10 * world.rank + 4] * 3
    resumed.fit(2)
    assert model_bits(resumed) == model_bits(unbroken)
    assert its.iter == memory.iter and np.array_equal(its.error_dict[0], memory.error_dict[0])


@pytest.mark.parametrize("then", [1, 5])
def test_shards_of_another_number_of_ranks(world, folder, then):
    """The shards of `then` ranks are made here of a whole state, in an order of their own."""
    config = config_in(folder)
    unbroken, _ = make(config, sharded=False)
    unbroken.fit(2)
    stopped, _ = make(config, sharded=False, stop_after=4)
    stopped.fit(2)
    state, arrays = stopped.state_dict(), stopped.arrays()
    shards = [
        {
            name: x
            for name, x in arrays.items()
            if name.startswith("optimizer.") and int(name.split(".")[1]) % then == rank
        }
        | {"stateful.memory.error_dict.0": np.full(3, float(rank))}
        for rank in range(then)
    ]
    state |= {"random": state["random"][:1] * then, "stateful": state["stateful"][:1] * then, "score": None}
    state |= {"config": config.as_dict(), "bits": {"ranks": then}}
    if world.rank == 0:
        Checkpoint({name: x for name, x in arrays.items() if name.startswith("model.")}, state).write(folder / "whole")
    read = raise_on_all_ranks(lambda: read_checkpoint(folder / "whole") if world.rank == 0 else None)
    resumed, memory = make(config)
    checkpointer = Checkpointer(config)
    checkpointer._newest = lambda: read and dataclasses.replace(read, shards=dict(enumerate(shards)))
    checkpointer.resume(resumed)
    assert memory.error_dict[0].tolist() == [world.rank % then] * 3
    records = resumed.optimizer.shard()
    assert set(records) == set(resumed.optimizer.owned())
    for number, record in records.items():
        for name, x in record.items():
            assert np.array_equal(x, arrays[f"optimizer.{number}.{name}"]), (number, name)


def test_a_shard_that_cannot_be_written_costs_a_checkpoint_and_not_the_run(world, folder, caplog, monkeypatch):
    config = config_in(folder)
    trainer, _ = make(config, stop_after=3)
    trainer.fit(1)
    checkpointer = Checkpointer(config)
    last = world.size - 1

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if world.rank == last:
            patch.setattr(checkpointer_module, "write_synced", fail)
        checkpointer.save(trainer)
        trainer.step += 1
        checkpointer.save(trainer)  # hears of the one before
        said = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
        assert len(said) == (world.rank == 0) and all(f"rank {last}: [Errno 28] No space left" in text for text in said)
        with pytest.raises(OSError, match=f"rank {last}: .*No space left") if world.rank == 0 else nullcontext():
            checkpointer.finish()
    trainer.step += 1
    checkpointer.save(trainer)
    raise_on_all_ranks(checkpointer.finish)
    if world.rank == 0:
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-0000000005"]
    dist.barrier()


def test_of_two_checkpoints_in_a_row_each_has_its_own_shards(world, folder):
    """The next one begins while the first is completed, under the same name when an epoch ends with a step's."""
    config = config_in(folder, keep=9)
    trainer, memory = make(config, stop_after=3)
    trainer.fit(1)
    checkpointer = Checkpointer(config)
    for moment in range(8):
        memory.error_dict[0] = np.full(3, 100.0 * moment + world.rank)
        trainer.step += moment % 2
        trainer.epoch += 1
        checkpointer.save(trainer)
    raise_on_all_ranks(checkpointer.finish)
    for step, moment in ((4, 2), (5, 4), (6, 6), (7, 7)):
        read = read_checkpoint(CheckpointStore(folder / "checkpoints").path(step))
        found = {rank: shard["stateful.memory.error_dict.0"][0] for rank, shard in read.shards.items()}
        assert found == {rank: 100.0 * moment + rank for rank in range(world.size)}, step
