"""A start that cannot work is an error with the cure, printed once; another one fills in ranks and sizes."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from harness import launcher
from harness.launcher import job, line_of, side_by_side
from harness.tiers import thinned

from mpiddp import cores

# Of programs/init: variables, and texts of which the first is printed once.
CONTRADICTIONS = {
    "arguments": ({}, ["world_size=5", "MPI's 3"]),
    "one rank's argument": ({}, ["rank=0", "rank 2 of MPI's 3"]),
    "environment": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 in the environment", "delete what sets WORLD_SIZE"]),
    "pretended nodes": ({"MPIDDP_NODES": "0,1"}, ["MPIDDP_NODES", "2 ranks", "has 3"]),
    "pretended nodes, mistyped": ({"MPIDDP_NODES": "0,x,1"}, ["ValueError: MPIDDP_NODES must be", "0,x,1"]),
    "after Finalize": ({}, ["MPI has been finalised in this process"]),
    "other comm": (
        {},
        ['SetupError: rank 0 calls init_process_group with comm= and on_error="raise", rank 1 with on_error="abort"'],
    ),
    "one rank's algorithm": (
        {"MPIDDP_DETERMINISTIC": "1"},
        ["SetupError: rank 0 has MPIDDP_ALGORITHM unset, MPIDDP_DETERMINISTIC=1", "rank 1 has MPIDDP_ALGORITHM all_"],
    ),
}


@pytest.mark.parametrize(
    "name",
    thinned(CONTRADICTIONS, "environment", "after Finalize", "other comm", "one rank's algorithm"),
)
def test_contradiction_is_printed_once(name):
    env, texts = CONTRADICTIONS[name]
    done = job("init", name, ranks=3, limit_s=30, **env)
    assert done.rc not in (0, 124) and "went on" not in done.stdout, done
    if name != "after Finalize":  # MPI is over, and nothing joins the ranks any more
        assert done.stderr.count(texts[0]) == 1, done
    assert all(text in done.stderr for text in texts), done


def test_rank_that_stalls_ends_the_job():
    done = job("init", "stalled", ranks=2, limit_s=25)
    assert done.rc == 110 and "init_process_group" in done.stderr and "went on" not in done.stdout, done


ANNOUNCED = {
    "Hydra": {"PMI_RANK": "{}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{}"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "2"},
    "srun": {"SLURM_PROCID": "{}", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "{}"},
}


@pytest.fixture(scope="module")
def singletons():
    """Start all of them at the same time, for mostly they wait for each other."""
    calls = {
        (name, rank): partial(job, "init", **{variable: value.format(rank) for variable, value in env.items()})
        for name, env in ANNOUNCED.items()
        for rank in (0, 1)
    }
    with side_by_side(calls, len(calls)) as jobs:
        yield jobs


@pytest.mark.core
@pytest.mark.parametrize("name", ANNOUNCED)
def test_singletons(singletons, name):
    """The launcher announced two ranks, and the library sees a world of one: rank 0 says so, rank 1 nothing."""
    done = [singletons[name, rank].result() for rank in (0, 1)]
    assert all(each.rc not in (0, 124) for each in done), done
    text = done[0].stderr
    if "SetupError" not in text:
        pytest.skip(f"the library itself ends such a process: {text[-200:]}")
    assert "started 2 ranks, but each sees a world of its own" in text, done[0]
    assert ("--mpi=pmix" if name == "srun" else "start with the mpirun that belongs to this library") in text
    assert "SetupError" not in done[1].stderr, done[1]


def other_mpiexec() -> str | None:
    """Return the launcher of another MPI: named by a variable, or of an environment beside this one."""
    beside = Path(sys.prefix).parent.glob("*/bin/mpiexec")
    found = [str(path) for path in beside if path.with_name("mpiexec.hydra").exists() == launcher.is_open_mpi()]
    return os.environ.get("MPIDDP_TEST_OTHER_MPIEXEC") or next(iter(found), None)


@pytest.mark.core
def test_launcher_of_the_other_mpi():
    other = other_mpiexec()
    if other is None:
        pytest.skip(
            "no other MPI: neither MPIDDP_TEST_OTHER_MPIEXEC names its mpiexec, nor is it in an environment here"
        )
    done = job("init", before=[other, "-n", "2"])
    assert done.rc not in (0, 124) and "went on" not in done.stdout, done
    cure = "it with the mpirun that belongs to this library"
    assert done.stderr.count(cure) + done.stderr.count(cure.replace("it", "start", 1)) == 1, done


@pytest.mark.parametrize("case", ["alone", "backend mpi, alone"])
def test_rank_without_launcher(case):
    done = job("init", case)
    assert done.rc == 1 and "went on" not in done.stdout, done
    assert "mpirun -np 4 python init.py" in done.stderr, done
    assert "mp.spawn" in done.stderr or "mpi" in case, done


def test_rank_and_world_size_of_the_backend_mpi_are_ignored_as_in_torch():
    done = job("init", "backend mpi", ranks=2)
    assert done.rc == 0 and done.stdout.count("went on 2") == 2, done
    text = "For MPI backend, world_size (0) and rank (0) are ignored since they are assigned by the MPI runtime."
    assert text in done.stderr, done


def test_python_without_the_global_lock():
    done = job("init", "free-threaded")
    assert done.rc == 1 and "went on" not in done.stdout, done
    assert "SetupError: mpiddp needs Python's global interpreter lock" in done.stderr, done
    assert "this Python is a free-threaded build; use a build of the same version with the lock" in done.stderr, done


def test_plain_launch_is_a_world_of_one():
    done = job("ranks")
    assert done.rc == 0 and not done.stderr and json.loads(done.stdout) == [[-1, -1, -1], [0, 1, 0]], done


@pytest.mark.core
def test_variables_are_filled_before_mpi_starts_and_corrected_after():
    done = job("ranks", ranks=4, MPIDDP_NODES="0,1,0,1")
    assert done.rc == 0, done
    found = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [early[:2] for early, _ in found] == [[rank, 4] for rank in range(4)], done
    assert sorted(early[2] for early, _ in found) == [0, 1, 2, 3], done
    assert [late for _, late in found] == [[rank, 4, rank // 2] for rank in range(4)], done


@pytest.mark.parametrize(("threads", "warns"), [(None, True), ("1", False)])
def test_too_many_blas_threads(threads, warns):
    done = job("init", ranks=2, **dict.fromkeys(cores.THREAD_VARIABLES, threads))
    assert done.rc == 0, done
    if len(os.sched_getaffinity(0)) == 1 and threads is None:
        pytest.skip("one core: each rank has one thread then")
    assert done.stderr.count("BLAS threads and have") == int(warns), done
    assert not warns or f"init.py:{line_of('init', 'group(**options)')}: UserWarning" in done.stderr, done
