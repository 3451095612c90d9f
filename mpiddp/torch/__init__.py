"""torch on MPI: the backend "mpiddp" of ``torch.distributed``, and torch modules in mpiddp's DistributedDataParallel.

The one place besides ``bench`` that imports torch. Under mpirun or srun
``torch.distributed.init_process_group("mpiddp")`` is all that a program needs, and ``python -m mpiddp.torch script.py``
runs a script that was written for torchrun. Names are loaded when they are first used, because ``import torch`` loads
this package to find the backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 - before .backend, which torch looks for at the end of its own import and must find whole

from .backend import register

if TYPE_CHECKING:
    from .ddp import DistributedDataParallel as DistributedDataParallel
    from .shrink import shrink_group as shrink_group
    from .symmetric import symmetric_empty as symmetric_empty

_NAMES = {"DistributedDataParallel": "ddp", "shrink_group": "shrink", "symmetric_empty": "symmetric"}

__all__ = ["DistributedDataParallel", "register", "shrink_group", "symmetric_empty"]


def __getattr__(name: str) -> Any:
    """Load what is asked for."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)


register()
