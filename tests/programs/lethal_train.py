"""The command `train`, in which ranks die: ``VICTIMS="RANK before|after MODULE:FUNCTION CALL,..." lethal_train.py``.

CALL is the number of the call before or after which the rank dies. ``RACE=step|epoch`` kills rank 1 when one of the
others completes what another one has not completed when it hears of the death.
"""

import importlib
import itertools
import os
import signal
import sys
import time

from mpiddp import cli, distributed as dist


def lethal(function, moment, when):
    calls = itertools.count(1)

    def call(*args, **options):
        number = next(calls)
        if number == moment and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **options)
        if number == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def race(late):
    """Rank 1 dies, and a late one waits until it hears of that."""
    from mpiddp.distributed.groups import default_group
    from mpiddp.mpi.lazy import MPI

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while dist.get_rank() == late:
        MPI.COMM_SELF.Iprobe()
        default_group()._monitor.check()
        time.sleep(0.01)


for victim in filter(None, os.environ.get("VICTIMS", "").split(",")):
    rank, when, place, moment = victim.split(" ")
    if rank == os.environ["OMPI_COMM_WORLD_RANK"]:
        module, _, name = place.partition(":")
        owner, *names = importlib.import_module(module), *name.split(".")
        for each in names[:-1]:
            owner = getattr(owner, each)
        setattr(owner, names[-1], lethal(getattr(owner, names[-1]), int(moment), when))

train_step = None
match os.environ.get("RACE"):
    case "epoch":
        from mpiddp.training.trainer import Trainer

        evaluate = Trainer.evaluate

        def evaluate_and_race(self):
            tally = evaluate(self)
            if dist.get_world_size() == 3:
                race(late=0)
            return tally

        Trainer.evaluate = evaluate_and_race
    case "step":
        from mpiddp.training.train_step import TrainStep

        update, steps = TrainStep._update, itertools.count(1)

        def race_and_update(self, *args):
            global train_step
            train_step = self
            if next(steps) == 8:
                race(late=2)
            return update(self, *args)

        TrainStep._update = race_and_update
code = cli.main(["train", *sys.argv[1:]])
if train_step is not None:
    whole = b"".join(p.data.tobytes() for p in train_step.model.module.parameters())
    sys.stdout.write(f"ended with {hash(whole)}\n")
sys.exit(code)
