"""Where a run's arrays live: what ``--device`` says, on every rank the same. Imports ``device`` and ``distributed``."""

from __future__ import annotations

import warnings
from typing import Any

import mpiddp.distributed as dist
from mpiddp.device import choice, cuda_fault, upload

from .config import UsageError


def fault(wanted: str) -> str | None:
    """Return why this rank's arrays cannot live on a GPU, or None where they can.

    Parameters
    ----------
    wanted : {"auto", "cpu", "cuda"}
        What ``--device`` says.

    Notes
    -----
    Asked before `init_process_group`, for it imports CuPy where there is any: a rank that has it gets its GPU there,
    before MPI starts.
    """
    return "--device cpu" if wanted == "cpu" else cuda_fault()


def agree(wanted: str, fault_here: str | None) -> bool:
    """Tell whether this run's arrays live on GPUs; every rank calls it, and gets the same answer.

    Raises
    ------
    UsageError
        On every rank, if GPUs are asked for and some rank has none.
    """
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault_here)
    without = [rank for rank, text in enumerate(faults) if text is not None]
    if not without:
        choice.choose(dist.get_node_local_rank())  # where the launcher has not announced it
        return True
    if wanted == "cuda":
        where = f" (on rank {without[0]})" if len(without) < len(faults) else ""
        raise UsageError(f"--device cuda: {faults[without[0]]}{where}")
    if len(without) < len(faults) and dist.get_rank() == 0:
        warnings.warn(f"training on the host, because rank {without[0]} has no GPU: {faults[without[0]]}", stacklevel=2)
    return False


def uploaded(batch: Any) -> Any:
    """Return a batch, nested as it may be, with every array on the device."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(uploaded, batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(uploaded, batch))
    if isinstance(batch, dict):
        return type(batch)((key, uploaded(value)) for key, value in batch.items())
    return upload(batch) if hasattr(batch, "dtype") else batch
