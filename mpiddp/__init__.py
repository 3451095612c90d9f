"""``torch.distributed`` and ``DistributedDataParallel`` on MPI: for NumPy and CuPy arrays, and as PyTorch's backend.

``import mpiddp as dist`` gives torch's names, loaded on first use: the import starts no MPI and imports neither NumPy
nor CuPy. If a launcher has started the program, the import sets RANK, WORLD_SIZE and LOCAL_RANK where they are unset,
because scripts read them on their first line. From then on an uncaught exception on one rank of several ends the job,
and printed lines appear at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

# A module's `from mpiddp import settings` would ask `__getattr__` below, which imports NumPy, if it were not here yet.
from . import errors as errors, moved, settings as settings
from .launchers import announce_ranks, launch

if TYPE_CHECKING:
    from .data import DataPartitioner as DataPartitioner, DistributedSampler as DistributedSampler
    from .distributed import *  # noqa: F403
    from .nn import manual_seed as manual_seed
    from .parallel import *  # noqa: F403
    from .serialization import load as load, save as save

__version__ = "0.2.0"

_PACKAGES = ("autograd", "data", "device", "distributed", "elastic", "nn", "optim", "parallel")
# Names at the top level that come from other packages than `distributed`, whose names are all at the top level.
_OF_PACKAGES = {
    "data": "DataPartitioner DistributedSampler",
    "nn": "manual_seed",
    "parallel": (
        "DataParallel DiLoCo DistributedDataParallel GradBucket Join JoinHook Joinable PowerSGDState SyncBatchNorm"
        " Timeline ZeroRedundancyOptimizer allreduce_hook average_gradients bf16_compress_hook fp16_compress_hook"
        " noop_hook powerSGD_hook"
    ),
    "serialization": "load save",
}
_NAMES = {name: package for package, names in _OF_PACKAGES.items() for name in names.split()}
moved.at_the_top.update(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name.startswith("__"):
        raise moved.missing(__name__, name)
    source = importlib.import_module(f"{__name__}.{_NAMES.get(name, 'distributed')}")
    try:
        found = getattr(source, name)
    except AttributeError:
        raise moved.missing(__name__, name, "distributed") from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    names = importlib.import_module(f"{__name__}.distributed").__all__
    return sorted([*names, *_NAMES, *_PACKAGES])


announce_ranks()
if launch() is not None:
    # A program without a launcher, such as an editor's check, does not wait for these imports.
    from .faults import uncaught
    from .mpi import stdio

    uncaught.install()
    stdio.show_lines()
