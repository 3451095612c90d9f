"""The command `train`, in which ranks die: ``VICTIMS="RANK before|after MODULE:FUNCTION CALL,..." lethal_train.py``.

CALL is the number of the call before or after which the rank dies. ``LATE``, which has the same form, is of ranks that
wait there until they hear of a death.
"""

import importlib
import itertools
import os
import signal
import sys
import time

from mpiddp import cli
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.lazy import MPI


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def wait():
    while True:
        MPI.COMM_SELF.Iprobe()
        default_group()._monitor.check()
        time.sleep(0.01)


def disturbed(function, moment, when, disturb):
    calls = itertools.count(1)

    def call(*args, **options):
        due = next(calls) == moment
        if due and when == "before":
            disturb()
        result = function(*args, **options)
        if due and when == "after":
            disturb()
        return result

    return call


for variable, disturb in (("VICTIMS", die), ("LATE", wait)):
    for event in filter(None, os.environ.get(variable, "").split(",")):
        rank, when, place, moment = event.split(" ")
        if rank == os.environ["OMPI_COMM_WORLD_RANK"]:
            module, _, name = place.partition(":")
            owner, *names = importlib.import_module(module), *name.split(".")
            for each in names[:-1]:
                owner = getattr(owner, each)
            setattr(owner, names[-1], disturbed(getattr(owner, names[-1]), int(moment), when, disturb))
code = cli.main(["train", *sys.argv[1:]])
models = sys.modules.get("models")
if models is not None and models.compressed_model is not None:
    whole = b"".join(p.data.tobytes() for p in models.compressed_model.module.parameters())
    sys.stdout.write(f"ended with {hash(whole)}\n")
sys.exit(code)
