"""mpi4py's ``MPI`` module, imported when it is first used.

Importing ``mpi4py.MPI`` initialises MPI, which aborts the process on many a login node. Everything above takes ``MPI``
from here, so that importing mpiddp, asking for ``--help`` or defining a subclass of ``DistributedDataParallel`` starts
nothing: ``init_process_group`` does. A program's own ``from mpi4py import MPI`` works as ever, before and after.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any

from mpiddp.errors import DistError


def _load() -> types.ModuleType:
    """Import mpi4py's MPI, which starts MPI, or say how to get an MPI library."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise DistError(
            f"no MPI library could be loaded ({error}); on a cluster load the site's module (`module load openmpi`),"
            " on a laptop run `pip install 'mpiddp[mpich]'`"
        ) from error


if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:

    class _Library(types.ModuleType):
        """Stands for the module until one of its names is asked for, then holds all of them."""

        def __getattr__(self, name: str) -> Any:
            library = _load()
            self.__dict__.update((key, value) for key, value in vars(library).items() if not key.startswith("__"))
            self.__file__ = library.__file__
            return getattr(library, name)

    MPI = _Library("mpi4py.MPI")
