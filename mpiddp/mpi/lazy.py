"""mpi4py's ``MPI`` module, imported on first use.

Importing mpiddp does not start MPI, which aborts on many login nodes.
"""

import contextlib
import ctypes
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from mpiddp.errors import SetupError

from .start import start

_DEBIANS = "libmpich.so.12"
"""Debian's name of MPICH, which mpi4py's wheel does not know."""


def _cure() -> str:
    with contextlib.suppress(OSError):
        ctypes.CDLL(_DEBIANS)
        folder = f"{sys.prefix}/lib"
        return (
            f"there is {_DEBIANS}, Debian's name of MPICH, which mpi4py's wheel does not know: give it the other one by"
            f" `ln -s /usr/lib/*/{_DEBIANS} {folder}/libmpi.so.12` and `export LD_LIBRARY_PATH={folder}`"
        )
    return "on a cluster load the site's module (`module load openmpi`), on a laptop run `pip install 'mpiddp[mpich]'`"


def _load() -> types.ModuleType:
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    try:
        rc: Any = importlib.import_module("mpi4py").rc
        wanted, rc.initialize = rc.initialize, False
        try:
            library = importlib.import_module("mpi4py.MPI")
        finally:
            rc.initialize = wanted
    except (ImportError, RuntimeError) as error:
        raise SetupError(f"no MPI library could be loaded ({error}); {_cure()}") from error
    if wanted and not library.Is_initialized():
        start(library, rc)
    return library


if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:

    class _Library(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            library = _load()
            self.__dict__.update((key, value) for key, value in vars(library).items() if not key.startswith("__"))
            self.__file__ = library.__file__
            # A plain module is five times faster.
            self.__class__ = types.ModuleType
            return getattr(library, name)

    MPI = _Library("mpi4py.MPI")
