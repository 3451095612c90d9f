"""``mpirun -np 4 python -m mpiddp.torch script.py ARGS``: run a script that was written for torchrun.

The script finds the variables that torchrun sets, and its backends "gloo" and "mpi" mean mpiddp.
"""

import argparse
import os
import runpy
import socket
import sys
from pathlib import Path

import torch

from mpiddp import distributed, rank_process
from mpiddp.cores import limit_blas_threads
from mpiddp.distributed.groups import default_group

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
    """Set the variables that torchrun sets; all ranks call this together."""
    world, port = default_group()._link.world, [0]
    with socket.socket() as free:  # a free port of rank 0's host, for a script that makes its own store
        free.bind(("", 0))
        port[0] = free.getsockname()[1]
    distributed.broadcast_object_list(port, src=0)
    several = any(world.nodes)
    variables = {
        "RANK": world.rank,
        "LOCAL_RANK": world.local_rank,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": len(world.local_ranks),
        "GROUP_RANK": world.nodes[world.rank],
        "GROUP_WORLD_SIZE": max(world.nodes) + 1,
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": world.hosts[0] if several else "127.0.0.1",
        "MASTER_PORT": port[0],
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
    distributed.destroy_process_group()  # the script makes the group anew, with its own timeout
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
