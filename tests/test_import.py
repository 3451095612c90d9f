"""Importing mpiddp, or asking it for help, starts nothing."""

import sys
import types

import pytest
from harness import launcher

import mpiddp
from mpiddp.mpi import finalize

REPORT = """
import sys
heavy = [name for name in ("mpi4py", "mpi4py.MPI", "cupy", "numpy", "torch") if name in sys.modules]
print("heavy:", heavy)
"""


def test_import_under_a_launcher_fills_the_ranks_and_starts_no_mpi():
    code = "import mpiddp, os\nprint(*(os.environ.get(n) for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')))\n" + REPORT
    done = launcher.job(code, PMI_RANK="2", PMI_SIZE="3", MPI_LOCALRANKID="1")
    assert (done.rc, done.stdout) == (0, "2 3 1\nheavy: []\n"), done


def test_library_that_another_thread_imports_does_not_run_yet(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    assert not finalize.running() and not finalize.finalized()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--help"], "COMMAND"), (["train", "--help"], "--batch-size"), (["--version"], mpiddp.__version__)],
)
def test_help_starts_no_mpi(arguments, said):
    # -X importtime writes every module that is imported.
    done = launcher.job("-X", "importtime", "-m", "mpiddp", *arguments)
    assert done.rc == 0, done
    assert said in done.stdout, done
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "mpiddp" in imported
    # BLAS reads the number of its threads when NumPy is imported, and the command sets it before.
    assert not imported & {"mpi4py.MPI", "cupy", "torch", "numpy"}
