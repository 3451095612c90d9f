"""torch on MPI: the backend "mpiddp" of ``torch.distributed``, and torch modules in mpiddp's DistributedDataParallel.

Only this package and ``bench`` import torch. Versions of torch before 2.15 import this package in ``import torch``, to
find the backend. To keep that short, the modules of the public names are imported only when a program uses a name.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 - first, because the end of `import torch` loads .backend, which must not be half imported

from .backend import register

if TYPE_CHECKING:
    from .arrays import symmetric_empty as symmetric_empty
    from .ddp import DistributedDataParallel as DistributedDataParallel
    from .default import shrink_group as shrink_group, use as use

_NAMES = {"DistributedDataParallel": "ddp", "shrink_group": "default", "symmetric_empty": "arrays", "use": "default"}

__all__ = ["DistributedDataParallel", "register", "shrink_group", "symmetric_empty", "use"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)


register()
