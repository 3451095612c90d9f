"""Python in a program in C that has started MPI, on some of its ranks."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness.launcher import PROGRAMS, Program, mpiexec

from mpiddp import examples

SOLVER = Path(examples.__file__).parent / "solver"
SEARCH = os.pathsep.join([str(SOLVER.parents[2]), sysconfig.get_path("purelib")])
PYTHON = {"PYTHONHOME": sys.base_prefix, "PYTHONPATH": SEARCH}


@pytest.fixture(scope="module")
def solver(tmp_path_factory):
    """Return the program, which has to be compiled."""
    launcher = mpiexec()
    compiler, header = launcher and launcher.with_name("mpicc"), Path(sysconfig.get_path("include"), "Python.h")
    if not (compiler and compiler.exists() and header.exists() and shutil.which("cc")):
        pytest.skip("no C compiler, or no headers of MPI or Python")
    library, name = Path(sysconfig.get_config_var("LIBDIR")), f"python{sysconfig.get_config_var('LDVERSION')}"
    if not (library / f"lib{name}.so").exists():
        pytest.skip(f"there is no lib{name}.so in {library} to link with")
    made = tmp_path_factory.mktemp("solver") / "solver"
    options = ["-I", header.parent, f"-L{library}", f"-l{name}", f"-Wl,-rpath,{library}"]
    subprocess.run([compiler, SOLVER / "solver.c", "-o", made, *options], check=True)
    return made


@pytest.mark.core
def test_a_solver_trains_a_model_from_its_own_ranks(solver):
    with Program([mpiexec(), "-n", "3", solver, SOLVER / "train.py", "101"], PYTHON) as started:
        done = started.wait(90)
    assert done.rc == 0 and done.stdout.count("is through") == 3, done
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 3 and losses[2] < losses[0] / 10, done


@pytest.mark.parametrize("level", ["FUNNELED", pytest.param("MULTIPLE", marks=pytest.mark.long)])
def test_python_in_a_program_in_c_does_not_end_it(solver, level):
    words = [solver, PROGRAMS / "embedded.py", "3", *(["MULTIPLE"] if level == "MULTIPLE" else [])]
    with Program([mpiexec(), "-n", "3", *words], PYTHON) as started:
        done = started.wait(90)
    assert done.rc == 0 and done.stdout.count("is through") == 3 and done.stdout.count("told") == 1, done
    assert done.stderr.count("ValueError: of this rank alone") == 1, done
    assert done.stderr.count("UserWarning: no watchdog runs") == (level == "FUNNELED"), done


@pytest.mark.core
def test_ranks_of_another_program(solver):
    python = [sys.executable, PROGRAMS / "guest.py", "MPMD"]
    with Program([mpiexec(), "-n", "1", solver, "none", "3", ":", "-n", "2", *python]) as started:
        done = started.wait(90)
    assert done.rc == 0 and done.stdout.count("is through") == 3, done
