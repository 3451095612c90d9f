"""Other backends' names for mpiddp: a script that asks for "gloo" or "mpi" gets mpiddp, and reads back that name."""

from collections.abc import Collection
from typing import Any

from torch.distributed import distributed_c10d as c10d

from .backend import NAME
from .process_group import ProcessGroup

_UNDECIDED = str(c10d.Backend.UNDEFINED)


def replace(names: Collection[str]) -> None:
    """Make torch use mpiddp in all later groups for which a program gives one of ``names``, or no backend at all.

    In a list by device, such as "cpu:gloo,cuda:nccl", the other names keep their meaning.
    """
    original = c10d._new_process_group_helper
    meant = dict.fromkeys((*names, _UNDECIDED), NAME)

    def helper(size: int, rank: int, ranks: list[int], backend: Any, *arguments: Any, **named: Any) -> Any:
        parts = (part.rpartition(":") for part in str(backend).split(","))
        by_us = ",".join(f"{device}{colon}{meant.get(name, name)}" for device, colon, name in parts)
        made = original(size, rank, ranks, by_us, *arguments, **named)
        group = made[0]
        if isinstance(group, ProcessGroup) and str(backend) != _UNDECIDED:
            c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
        return made

    c10d._new_process_group_helper = helper
    if "mpi" in names:
        c10d._MPI_AVAILABLE = True
    if "nccl" in names:
        c10d._NCCL_AVAILABLE = True
