"""A group of a communicator takes part in a program whose other ranks never hear of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from harness.launcher import PROGRAMS, ULFM, Program, is_open_mpi, job, mpiexec

SEED = int(os.environ.get("MPIDDP_TEST_SEED", time.time_ns() % 2**32))
SERIALIZED = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
FUNNELED = {"MPI4PY_RC_THREAD_LEVEL": "funneled"}


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["silent"], {}),
        (["solver", SEED, 1], {}),
        (["communicators"], {}),
        (["raises"], SERIALIZED),
        pytest.param(["halves"], {}, marks=pytest.mark.long),
        pytest.param(["halves"], FUNNELED, marks=pytest.mark.long),
        pytest.param(["solver", SEED + 1, 3], FUNNELED, marks=pytest.mark.long),
    ],
    ids=["silent", "solver", "communicators", "raises, SERIALIZED", "halves", "halves, FUNNELED", "solver, FUNNELED"],
)
def test_guest(words, env):
    done = job("guest", *words, ranks=5, limit_s=150, **env)
    assert done.rc == 0 and done.stdout.count("is through") == 5, (SEED, done)
    assert ("no watchdog runs" in done.stderr) == bool(env), done


def test_a_guest_ends_its_host_if_it_was_told_to():
    done = job("guest", "aborts", ranks=3)
    assert done.rc == 111 and "disagree" in done.stderr and "is through" not in done.stdout, done


@pytest.mark.skipif(not is_open_mpi(), reason="only Open MPI's mpirun lets ranks live on")
@pytest.mark.parametrize("who", ["host", "guest"])
def test_kill(who):
    # mpiddp leaves these components out where it starts MPI; here the program does.
    done = job("guest", "killed", who, ranks=4, options=ULFM, limit_s=90, OMPI_MCA_coll="^han,adapt")
    assert done.stdout.count("is through") == 3, done


@pytest.fixture(scope="module")
def solver(tmp_path_factory):
    """Return the words that start solver.c, which has to be compiled, and the variables it needs."""
    launcher = mpiexec()
    compiler, header = launcher and launcher.with_name("mpicc"), Path(sysconfig.get_path("include"), "Python.h")
    if not (compiler and compiler.exists() and header.exists() and shutil.which("cc")):
        pytest.skip("no C compiler, or no headers of MPI or Python")
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        pytest.skip("this Python is no shared library")
    library, made = sysconfig.get_config_var("LIBDIR"), tmp_path_factory.mktemp("solver") / "solver"
    name = sysconfig.get_config_var("LDVERSION")
    options = ["-I", header.parent, f"-L{library}", f"-lpython{name}", f"-Wl,-rpath,{library}"]
    subprocess.run([compiler, PROGRAMS / "solver.c", "-o", made, *options], check=True)
    search = [str(Path(__file__).parents[2]), sysconfig.get_path("purelib")]
    return [made, PROGRAMS / "embedded.py", repr(search)], {"PYTHONHOME": sys.base_prefix}


@pytest.mark.parametrize("level", ["FUNNELED", pytest.param("MULTIPLE", marks=pytest.mark.long)])
def test_python_in_a_program_in_c_does_not_end_it(solver, level):
    words, env = solver
    with Program([mpiexec(), "-n", "3", *words, *(["multiple"] if level == "MULTIPLE" else [])], env) as started:
        done = started.wait(90)
    assert done.rc == 0 and done.stdout.count("is through") == 3 and done.stdout.count("told") == 1, done
    assert done.stderr.count("ValueError: of this rank alone") == 1, done
    assert done.stderr.count("UserWarning: no watchdog runs") == (level == "FUNNELED"), done


def test_ranks_of_another_program(solver):
    words, _ = solver
    python = [sys.executable, PROGRAMS / "guest.py", "MPMD"]
    with Program([mpiexec(), "-n", "1", *words, ":", "-n", "2", *python]) as started:
        done = started.wait(90)
    assert done.rc == 0 and done.stdout.count("is through") == 3, done
