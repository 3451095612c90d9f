"""A start that cannot work is an error with the cure, printed once; another one fills in ranks and sizes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from harness import launcher
from harness.launcher import SHARED, mpirun, python
from harness.tiers import thinned

INIT = "import mpiddp as dist\ndist.init_process_group()\nprint('went on', flush=True)\n"

CONTRADICTIONS = {
    "arguments": (INIT.replace("group()", "group(rank=0, world_size=5)"), {}, ["world_size=5", "MPI's 3"]),
    "one rank's argument": (
        "import os\n" + INIT.replace("group()", "group(rank=int(os.environ['RANK']) % 2)"),
        {},
        ["rank=0", "rank 2 of MPI's 3"],
    ),
    "environment": (INIT, {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 in the environment", "delete what sets WORLD_SIZE"]),
    "pretended nodes": (INIT, {"MPIDDP_NODES": "0,1"}, ["MPIDDP_NODES", "2 ranks", "has 3"]),
    "pretended nodes, mistyped": (INIT, {"MPIDDP_NODES": "0,x,1"}, ["ValueError: MPIDDP_NODES must be", "0,x,1"]),
    "after Finalize": (
        f"from mpi4py import MPI\nimport mpiddp\nMPI.Finalize()\n{INIT}",
        {},
        ["MPI has been finalised in this process"],
    ),
}


@pytest.mark.parametrize(
    "name", thinned(CONTRADICTIONS, "arguments", "environment", "pretended nodes", "after Finalize")
)
def test_contradiction_is_printed_once(name):
    program, env, texts = CONTRADICTIONS[name]
    job = mpirun(3, program, env=env)
    assert job.rc not in (0, 124) and "went on" not in job.stdout, job
    if name != "after Finalize":  # MPI is over, and nothing joins the ranks any more
        assert job.stderr.count(texts[0]) == 1, job
    for text in texts:
        assert text in job.stderr, job


@pytest.mark.parametrize(
    "env",
    [
        {"PMI_RANK": "{}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{}"},
        {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "{}", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "{}"},
    ],
    ids=["Hydra", "Open MPI", "srun"],
)
def test_singletons(env):
    """The launcher announced two ranks, and the library sees a world of one: rank 0 says so, rank 1 nothing."""
    jobs = [launcher.start(None, INIT, env={k: v.format(rank) for k, v in env.items()}) for rank in (0, 1)]
    with jobs[0] as first, jobs[1] as second:
        done = [first.wait(60), second.wait(60)]
    assert all(job.rc not in (0, 124) for job in done), done
    text = done[0].stderr
    if "SetupError" not in text:
        pytest.skip(f"the library itself ends such a process: {text[-200:]}")
    assert "started 2 ranks, but each sees a world of its own" in text, done[0]
    assert ("--mpi=pmix" if "SLURM_PROCID" in env else "start with the mpirun that belongs to this library") in text
    assert "SetupError" not in done[1].stderr, done[1]


def other_mpiexec() -> str | None:
    """Return the launcher of another MPI: named by a variable, or of an environment beside this one."""
    own = launcher.mpiexec()
    beside = Path(sys.prefix).parent.glob("*/bin/mpiexec")
    found = [str(path) for path in beside if own is not None and is_hydra(path) != is_hydra(own)]
    return os.environ.get("MPIDDP_TEST_OTHER_MPIEXEC") or next(iter(found), None)


def is_hydra(mpiexec: Path) -> bool:
    return mpiexec.with_name("mpiexec.hydra").exists()


def test_launcher_of_the_other_mpi(tmp_path):
    other = other_mpiexec()
    if other is None:
        pytest.skip(
            "no other MPI: neither MPIDDP_TEST_OTHER_MPIEXEC names its mpiexec, nor is it in an environment here"
        )
    script = tmp_path / "init.py"
    script.write_text(INIT)
    with launcher.Program([other, "-n", "2", sys.executable, script]) as job:
        done = job.wait(60)
    assert done.rc not in (0, 124) and "went on" not in done.stdout, done
    assert (
        done.stderr.count("start with the mpirun that belongs to this library")
        + done.stderr.count("it with the mpirun that belongs to this library")
        == 1
    ), done


@pytest.mark.once
def test_rank_without_launcher():
    job = python(INIT.replace("group()", "group(rank=1, world_size=4)"))
    assert job.rc == 1, job
    assert "mpirun -np 4 python program.py" in job.stderr and "mp.spawn" in job.stderr, job


@pytest.mark.parametrize("ranks", [None, 2])
def test_no_library(ranks, tmp_path):
    nothing = tmp_path / "libmpi.so"
    nothing.write_text("")
    env = {"MPI4PY_LIBMPI": str(nothing), "MPI4PY_MPIABI": "impi"}
    job = python(INIT, env=env) if ranks is None else mpirun(ranks, INIT, env=env)
    assert job.rc not in (0, 124), job
    assert job.stderr.count("pip install 'mpiddp[mpich]'") == 1 and "module load" in job.stderr, job


@pytest.mark.once
def test_python_without_the_global_lock():
    free_threaded = "import sysconfig\nsysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n"
    job = python(free_threaded + INIT)
    assert job.rc == 1 and "went on" not in job.stdout, job
    assert "SetupError: mpiddp needs Python's global interpreter lock" in job.stderr, job
    assert "this Python is a free-threaded build; use a build of the same version with the lock" in job.stderr, job


def test_plain_launch_is_a_world_of_one():
    program = """
import os
import numpy as np
import mpiddp as dist
assert "RANK" not in os.environ
dist.init_process_group()
x = np.ones(3)
dist.all_reduce(x)
assert (dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank(), x[0]) == (0, 1, 0, 1)
assert os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "1" and os.environ["LOCAL_RANK"] == "0"
"""
    job = python(program)
    assert job.rc == 0 and not job.stderr, job


def test_variables_are_filled_before_mpi_starts_and_corrected_after():
    program = """
import json, os, sys
import mpiddp as dist
early = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
assert "mpi4py.MPI" not in sys.modules and "numpy" not in sys.modules
assert dist.get_node_local_rank() == early[2]
dist.init_process_group()
late = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
assert late[:2] == [dist.get_rank(), dist.get_world_size()] and late[2] == dist.get_node_local_rank()
sys.stdout.write(json.dumps([early, late]) + "\\n")
"""
    job = mpirun(4, program, env={"MPIDDP_NODES": "0,1,0,1"})
    assert job.rc == 0, job
    found = sorted(json.loads(line) for line in job.stdout.splitlines())
    assert [early[:2] for early, _ in found] == [[rank, 4] for rank in range(4)], job
    assert sorted(early[2] for early, _ in found) == [0, 1, 2, 3], job
    assert [late[2] for _, late in found] == [0, 0, 1, 1], job


@pytest.mark.once
def test_misuse():
    program = """
import numpy as np
import mpiddp as dist

def refuses(kind, text, call, *args):
    try:
        call(*args)
    except kind as error:
        assert text in str(error), error
    else:
        raise SystemExit(f"{call} went through")

x = np.ones(2)
missing = "Default process group has not been initialized, please make sure to call init_process_group."
refuses(ValueError, missing, dist.all_reduce, x)
refuses(AssertionError, "Process group cannot be None", dist.destroy_process_group)
dist.init_process_group()
refuses(ValueError, "trying to initialize the default process group twice!", dist.init_process_group)
group = dist.new_group([0])
dist.destroy_process_group()
refuses(AssertionError, "Process group cannot be None", dist.destroy_process_group)
refuses(ValueError, missing, dist.all_reduce, x)
refuses(ValueError, missing, dist.get_rank)
if isinstance(group, dist.ProcessGroup):
    refuses(ValueError, "destroyed", dist.all_reduce, x, dist.ReduceOp.SUM, group)
dist.init_process_group()
dist.all_reduce(x)
assert x[0] == 2
"""
    job = mpirun(2, program)
    assert job.rc == 0, job


@pytest.mark.once
@pytest.mark.parametrize(
    ("threads", "warns"), [(None, True), pytest.param("64", True, marks=pytest.mark.long), ("1", False)]
)
def test_too_many_blas_threads(threads, warns):
    env = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    job = mpirun(2, INIT, env=env)
    assert job.rc == 0, job
    if len(os.sched_getaffinity(0)) == 1 and threads is None:
        pytest.skip("one core: each rank has one thread then")
    assert job.stderr.count("BLAS threads and have") == int(warns), job
    assert not warns or "program.py:2: UserWarning" in job.stderr, job


@pytest.mark.parametrize("method", thinned(["spawn", "forkserver"], "spawn"))
def test_a_process_that_imports_the_program_again_is_no_rank(method):
    """It has its parent's launcher variables, and must not join the job in its place."""
    program = f"""
import multiprocessing
import numpy as np
import mpiddp as dist
dist.init_process_group()
def nothing():
    pass
if __name__ == "__main__":
    if dist.get_rank() == 0:
        child = multiprocessing.get_context({method!r}).Process(target=nothing)
        child.start()
        child.join()
        print(f"the child failed: {{child.exitcode != 0}}", flush=True)
    x = np.ones(1)
    dist.all_reduce(x)
    print(f"sum {{x[0]}}", flush=True)
"""
    job = mpirun(2, program)
    assert job.rc == 0 and "the child failed: True" in job.stdout and job.stdout.count("sum 2.0") == 2, job
    assert job.stderr.count("under `if __name__ == '__main__':`") == 1, job


def test_a_program_that_a_rank_starts_is_no_rank():
    """Directly, with the rank's files or by a shell; the cure in its text works, alone and as a job."""
    program = """
import os, subprocess, sys
import numpy as np
import mpiddp as dist
dist.init_process_group()
code = "import mpiddp as dist; dist.init_process_group(); print('world of', dist.get_world_size(), flush=True)"
child = [sys.executable, "-c", code]
own = dist.settings.outside_of_jobs()
starts = {
    "child": (child, {}),
    "with files": (child, {"close_fds": False}),
    "by a shell": (f'{sys.executable} -c "{code}"; exit $?', {"shell": True}),
    "alone": (child, {"env": own}),
    "job": ([os.environ["MPIEXEC"], "-n", "2", *child], {"env": own}),
    "raises": ([sys.executable, "-c", "import mpiddp; 1 / 0"], {}),
}
if dist.get_rank() == 1:
    for name, (command, how) in starts.items():
        done = subprocess.run(command, capture_output=True, text=True, **how)
        last = done.stderr.splitlines()[-1:]
        sys.stdout.write(f"{name}: {done.returncode} {done.stdout.split()} {'[rank' in done.stderr} {last}\\n")
x = np.ones(1)
dist.all_reduce(x)
sys.stdout.write(f"sum {x[0]}\\n")
"""
    job = mpirun(2, program, env={"MPIEXEC": str(launcher.mpiexec())})
    assert job.rc == 0 and job.stdout.count("sum 2.0") == 2, job
    for name in ("child", "with files", "by a shell"):
        assert f'{name}: 1 [] False ["mpiddp.errors.SetupError: rank 1 of 2 (process ' in job.stdout, job
    assert job.stdout.count("with `env=mpiddp.settings.outside_of_jobs()`") == 3, job
    assert "alone: 0 ['world', 'of', '1'] False" in job.stdout, job
    assert "job: 0 ['world', 'of', '2', 'world', 'of', '2'] False" in job.stdout, job
    # Python's own traceback and exit code: it is no rank.
    assert "raises: 1 [] False ['ZeroDivisionError: division by zero']" in job.stdout, job


@pytest.mark.parametrize("method", thinned(["spawn", "forkserver"], "spawn"))
def test_a_pool_of_processes_that_import_the_program_again_ends_the_job(method):
    """A Pool replaces failing workers without end."""
    program = f"""
import multiprocessing
import numpy as np
import mpiddp as dist
dist.init_process_group()
lock = multiprocessing.get_context({method!r}).Lock()
print(lock._semlock.name, flush=True)
with multiprocessing.get_context({method!r}).Pool(2) as pool:
    print(pool.map(abs, range(4)))
"""
    job = mpirun(2, program, timeout_s=30)
    assert job.rc not in (0, 124), job
    assert 1 <= job.stderr.count("under `if __name__ == '__main__':`") <= 4, job
    semaphores = re.findall(r"/(mp-\w+)", job.stdout)
    assert semaphores and not [name for name in semaphores if (SHARED / f"sem.{name}").exists()], job
