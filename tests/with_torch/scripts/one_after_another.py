"""Runs scripts for torchrun in one job, for importing torch takes longer than they do: FOLDER BACKENDS NAME...

All scripts run with each of the backends, separated by commas; "unset" leaves the choice to them. "original" is torch's
Gloo also under ``python -m mpiddp.torch``, where "gloo" means mpiddp.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

if __name__ == "__main__":
    folder, backends, *names = sys.argv[1:]
    dist.Backend.register_backend("original", dist.ProcessGroupGloo, devices=["cpu"])
    # torch.distributed.rendezvous is a function, too.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    connect = rendezvous._create_c10d_store
    for backend in backends.split(","):
        os.environ.pop("BACKEND", None)
        if backend != "unset":
            os.environ["BACKEND"] = backend
        (own := Path(folder, backend)).mkdir(parents=True, exist_ok=True)
        sys.argv = ["", str(own)]
        if os.environ["RANK"] == "0":
            print(f"== {backend}", flush=True)
        for name in names:
            # torchrun has one store for the job, which keeps what the script before has set.
            rendezvous._create_c10d_store = lambda *args, name=name: dist.PrefixStore(name, connect(*args))
            if os.environ["RANK"] == "0":
                print(f"-- {name}", flush=True)
            runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
