"""Start in ways that cannot work, or not as it seems: ``init.py [CASE]``."""

import os
import sys
import sysconfig
import time

case = sys.argv[1] if len(sys.argv) > 1 else ""
if case == "free-threaded":
    sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1

import mpiddp as dist  # noqa: E402 - it fills in RANK, too
from mpiddp.mpi import processes  # noqa: E402

rank = int(os.environ.get("RANK", 0))
options = {
    "arguments": {"rank": 0, "world_size": 5},
    "one rank's argument": {"rank": rank % 2},
    "alone": {"rank": 1, "world_size": 4},
    "backend mpi": {"rank": 0, "world_size": 0, "backend": "mpi"},
    "backend mpi, alone": {"rank": 0, "world_size": 4, "backend": "mpi"},
}.get(case, {})
if case in ("after Finalize", "stalled", "other comm"):
    from mpi4py import MPI

    class Comm(MPI.Intracomm):
        """Stalls on rank 1; the ranks have their world before the group duplicates it."""

        def _stall(self):
            if self.rank == 1:
                time.sleep(30)

        def Dup(self, *args):  # noqa: N802
            self._stall()
            return super().Dup(*args)

        def Idup(self, *args):  # noqa: N802
            self._stall()
            return super().Idup(*args)

    match case:
        case "after Finalize":
            MPI.Finalize()
        case "stalled":
            options = {"timeout": 2, "comm": Comm(MPI.COMM_WORLD)}
        case "other comm":
            options = {"timeout": 2, "comm": None if rank else MPI.COMM_WORLD}
if rank == 1 and case == "one rank's algorithm":
    os.environ["MPIDDP_ALGORITHM"] = "all_reduce:attach"
if rank == 1 and case == "an error before":
    raise ValueError("boom")
if rank == 1 and case in ("ends before", "starts MPI and ends"):
    if case == "starts MPI and ends":
        from mpi4py import MPI
    sys.exit()
# Open MPI's launcher itself ends a job of which a rank ends without MPI when others have started it.
while case == "ends before" and 1 in processes.started_ranks(os.getppid()).values():
    time.sleep(0.01)
dist.init_process_group(**options)
print("went on", dist.get_world_size(), flush=True)
