"""Importing mpiddp, or asking it for help, starts nothing."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
from harness import launcher

from mpiddp.mpi import finalize

REPORT = """
import sys
heavy = [name for name in ("mpi4py", "mpi4py.MPI", "cupy", "numpy", "torch") if name in sys.modules]
print("heavy:", heavy)
"""
LAUNCHED = {
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    "MPICH": {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1"},
    "srun": {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "1"},
}


def test_import_loads_nothing_heavy():
    done = launcher.job("import mpiddp\n" + REPORT)
    assert (done.rc, done.stdout) == (0, "heavy: []\n"), done


@pytest.mark.parametrize("name", LAUNCHED)
def test_import_under_a_launcher_fills_the_ranks_and_starts_no_mpi(name):
    code = "import mpiddp, os\nprint(*(os.environ.get(n) for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')))\n" + REPORT
    done = launcher.job(code, **LAUNCHED[name])
    assert (done.rc, done.stdout) == (0, "2 3 1\nheavy: []\n"), done


def test_library_that_another_thread_imports_does_not_run_yet(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    assert not finalize.running() and not finalize.finalized()


@pytest.mark.skipif(importlib.util.find_spec("mpiddp.__main__") is None, reason="this mpiddp has no command line")
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["info", "--help"]], ids=" ".join)
def test_help_starts_no_mpi(arguments):
    # -X importtime writes every module that is imported.
    done = launcher.job("-X", "importtime", "-m", "mpiddp", *arguments)
    assert done.rc == 0, done
    assert "usage:" in done.stdout, done
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "mpiddp" in imported
    # BLAS reads the number of its threads when NumPy is imported, and the command sets it before.
    assert not imported & {"mpi4py.MPI", "cupy", "torch", "numpy"}
