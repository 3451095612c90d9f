"""mpi4py's ``MPI`` module, imported on first use.

Importing mpiddp does not start MPI, because MPI_Init aborts on many login nodes.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from mpiddp.errors import SetupError

from .start import start


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
        raise SetupError(
            f"no MPI library could be loaded ({error}); on a cluster load the site's module (`module load openmpi`), on"
            " a laptop run `pip install 'mpiddp[mpich]'`; to Debian's MPICH give the name that mpi4py's wheel knows, by"
            f" `ln -s /usr/lib/*/libmpich.so.12 {sys.prefix}/lib/libmpi.so.12` and `export"
            f" LD_LIBRARY_PATH={sys.prefix}/lib`"
        ) from error
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
            # A plain module finds its attributes five times faster than this class.
            self.__class__ = types.ModuleType
            return getattr(library, name)

    MPI = _Library("mpi4py.MPI")
