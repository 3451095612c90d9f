"""``mpirun -np 4 python -m mpiddp.examples.checkpoint_resume``: stop in the middle of an epoch, go on to the same bits.

Besides the model, a checkpoint holds the optimizer's momentum, the position in the epoch and each rank's random state:
the Trainer's ``arrays`` and ``state_dict``. Rank 0 writes them, whole or not at all, and reads and broadcasts them.
``python -m mpiddp train --output DIR --resume auto`` does the same.

Output::

    trained without a stop: 20 steps
    trained until step 13 and saved step-0000000013
    read step-0000000013 and trained on from step 13 to step 20
    equal to the model that was never stopped, bit for bit: True
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.data import ArrayDataset, DataLoader, GlobalBatchSampler
from mpiddp.examples.printing import print_once
from mpiddp.training import Trainer
from mpiddp.training.checkpoint import Checkpoint, CheckpointStore


def new_trainer() -> Trainer:
    random = np.random.default_rng(0)
    data = ArrayDataset(random.standard_normal((80, 8), np.float32), random.integers(0, 4, 80))
    nn.manual_seed(0)
    nn.random.set_stream(dist.get_rank())  # ranks drop different units
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4))
    ddp = dist.DistributedDataParallel(model)
    return Trainer(
        ddp,
        optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9),
        nn.functional.cross_entropy,
        DataLoader(data, batch_sampler=GlobalBatchSampler(data, batch_size=8)),
        correct_fn=lambda output, labels: float((output.data.argmax(1) == labels).sum()),
    )


def train_and_stop(store: CheckpointStore, at_step: int) -> None:
    trainer = new_trainer()
    trainer.stop = lambda: trainer.step + 1 == at_step
    trainer.fit(epochs=2)
    state = trainer.state_dict()  # collective
    if dist.get_rank() == 0:
        store.save(Checkpoint(trainer.arrays(), state))
        store.finish()
        print(f"trained until step {trainer.step} and saved {store.path(trainer.step).name}")


def resume(store: CheckpointStore) -> Trainer:
    trainer = new_trainer()
    found = [store.newest()[0]] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(found, src=0)
    (checkpoint,) = found
    assert checkpoint is not None
    trainer.load_state_dict(checkpoint.state, checkpoint.arrays)
    began = trainer.step
    trainer.fit(epochs=2)
    print_once(f"read {store.path(began).name} and trained on from step {began} to step {trainer.step}")
    return trainer


def main() -> None:
    dist.init_process_group()
    never_stopped = new_trainer()
    never_stopped.fit(epochs=2)
    print_once(f"trained without a stop: {never_stopped.step} steps")

    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))  # rank 0 alone uses it
        train_and_stop(store, at_step=13)
        resumed = resume(store)
        dist.barrier()

    expected, found = never_stopped.model.module.state_dict(), resumed.model.module.state_dict()
    equal = np.array([all(np.array_equal(expected[name], found[name]) for name in expected)])
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    print_once(f"equal to the model that was never stopped, bit for bit: {bool(equal[0])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
