"""Runs other scripts for torchrun in one job, for importing torch takes longer than they do: FOLDER NAME..."""

import importlib
import os
import runpy
import sys
from pathlib import Path

from torch.distributed import PrefixStore

if __name__ == "__main__":
    # torch.distributed.rendezvous is a function, too.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    connect = rendezvous._create_c10d_store
    for name in sys.argv[2:]:
        # torchrun has one store for the job, which keeps what the script before has set.
        rendezvous._create_c10d_store = lambda *args, name=name: PrefixStore(name, connect(*args))
        if os.environ["RANK"] == "0":
            print(f"-- {name}", flush=True)
        runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
