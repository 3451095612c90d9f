import shutil
import sys
from pathlib import Path

import pytest
from harness.launcher import PROGRAMS, Program, mpiexec

from mpiddp import data, examples

HEAT = Path(examples.__file__).parent / "heat"


def compiled(folder: Path, solver: str) -> Path:
    """Compile a solver by the compilers of this environment's MPI; skip where there are none."""
    mpicc = (mpiexec() or Path("none")).with_name("mpicc")
    for needed in (mpicc, "cc", *(["gfortran"] if solver == "heat.f90" else [])):
        if shutil.which(needed) is None:
            pytest.skip(f"no {Path(needed).name} to compile {solver}")
    include, program = Path(data.get_include()), folder / "heat"
    steps = [[mpicc, "-O2", "-Wall", "-Wextra", "-Werror", f"-I{include}", HEAT / solver, "-o", program]]
    if solver == "heat.f90":
        library = mpicc.parents[1] / "lib"
        sources = [include / "mpiddp_stream.f90", HEAT / solver, folder / "stream.o"]
        linked = [f"-L{library}", f"-Wl,-rpath,{library}", "-lmpi"]
        steps = [
            [mpicc, "-O2", "-c", include / "mpiddp_stream.c", "-o", folder / "stream.o"],
            ["gfortran", "-O2", f"-J{folder}", *sources, *linked, "-o", program],
        ]
    for step in steps:
        with Program(step) as compiler:
            done = compiler.wait(60)
        assert done.rc == 0, done
    return program


@pytest.mark.parametrize("solver", [pytest.param("heat.c", marks=pytest.mark.core), "heat.f90"])
def test_a_solver_that_knows_no_more_than_the_header_trains_a_model(tmp_path, solver):
    """On two ranks, one of whose streams may end first, in a job of two programs; no sample touches the disk."""
    program = compiled(tmp_path, solver)
    train = [sys.executable, PROGRAMS / "opens.py", HEAT / "train.py", "1"]
    command = [mpiexec(), "-n", "1", program, "60", ":", "-n", "2", *train]
    with Program(command) as started:
        done = started.wait(120)
    assert done.rc == 0, done
    assert "1200 samples" in done.stdout and "error" in done.stdout, done
    assert "opened to write" not in done.stdout, done
