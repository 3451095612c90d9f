"""torch on MPI: the backend "mpiddp" of ``torch.distributed``, and torch modules in mpiddp's DistributedDataParallel.

The one place besides ``bench`` that imports torch. Under mpirun or srun
``torch.distributed.init_process_group("mpiddp")`` is all that a program needs, and ``python -m mpiddp.torch script.py``
runs a script that was written for torchrun.
"""

from .backend import register
from .ddp import DistributedDataParallel
from .symmetric import symmetric_empty

__all__ = ["DistributedDataParallel", "register", "symmetric_empty"]

register()
