"""A group of a communicator takes part in a program whose other ranks never hear of it."""

import os
import time

import pytest
from harness.launcher import ULFM, is_open_mpi, job
from harness.tiers import thinned

SEED = int(os.environ.get("MPIDDP_TEST_SEED", time.time_ns() % 2**32))
SERIALIZED = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
FUNNELED = {"MPI4PY_RC_THREAD_LEVEL": "funneled"}


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["silent"], {}),
        (["solver", SEED, 1], {}),
        pytest.param(["communicators"], {}, marks=pytest.mark.core),
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


@pytest.mark.core
def test_a_guest_ends_its_host_if_it_was_told_to():
    done = job("guest", "aborts", ranks=3)
    assert done.rc == 111 and "disagree" in done.stderr and "is through" not in done.stdout, done


@pytest.mark.core
@pytest.mark.skipif(not is_open_mpi(), reason="only Open MPI's mpirun lets ranks live on")
@pytest.mark.parametrize("who", thinned(["host", "guest"], "guest"))
def test_kill(who):
    # mpiddp leaves these components out where it starts MPI; here the program does.
    done = job("guest", "killed", who, ranks=4, options=ULFM, limit_s=90, OMPI_MCA_coll="^han,adapt")
    assert done.stdout.count("is through") == 3, done
