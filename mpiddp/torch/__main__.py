"""``mpirun -np 4 python -m mpiddp.torch script.py ARGS``: run a script that was written for torchrun.

It finds torchrun's variables, and "gloo" and "mpi" mean mpiddp.
"""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from mpiddp import distributed, rank_process
from mpiddp.cores import limit_blas_threads

from . import names, rendezvous

_NAMES = ("gloo", "mpi")


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mpirun -np N python -m mpiddp.torch",
        description='Run a script that was written for torchrun; its backends "gloo" and "mpi" mean mpiddp.',
    )
    parser.add_argument("--nccl", action="store_true", help='"nccl" means mpiddp too')
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def announce() -> None:
    """Set torchrun's variables; all ranks call."""
    rank, size, local_rank = distributed.get_rank(), distributed.get_world_size(), distributed.get_node_local_rank()
    places: list[Any] = [None] * size
    with socket.socket() as free:  # on rank 0's host, for a script that makes its own store
        free.bind(("", 0))
        port = free.getsockname()[1]
    distributed.all_gather_object(places, (socket.gethostname(), local_rank, port))
    # Nodes in the order of their first ranks.
    firsts = [index for index, (_, local, _) in enumerate(places) if local == 0]
    hosts = [places[index][0] for index in firsts]
    host = socket.gethostname()
    alone = len(firsts) == 1
    here = size if alone else sum(each == host for each, _, _ in places)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": 0 if alone else hosts.index(host),
        "GROUP_WORLD_SIZE": len(firsts),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1" if alone else places[0][0],
        "MASTER_PORT": places[0][2],
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": rendezvous.RUN_ID,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})


def main(arguments: list[str]) -> None:
    found = read_arguments(arguments)
    threads = limit_blas_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    distributed.init_process_group()
    announce()
    distributed.destroy_process_group()  # the script makes it anew, with its own timeout
    rank_process.release_rank()
    rendezvous.prefer_mpi()
    names.replace((*_NAMES, "nccl") if found.nccl else _NAMES)
    sys.argv = [found.script, *found.arguments]
    if found.module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(found.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(found.script).resolve().parent))
        runpy.run_path(found.script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
