"""slurm/train_cpu.sbatch without Slurm: a fake srun starts mpiexec, a fake scontrol knows the script's place."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import launcher
from harness.launcher import Program

SCRIPT = Path(__file__).parents[1] / "slurm" / "train_cpu.sbatch"

SRUN = """#!/bin/bash
# Options go to a file, the command to mpiexec; a signal to srun goes to the ranks, as Slurm's does.
if [ "$1" = --mpi=list ]; then echo "MPI plugin types are... pmix pmi2 none"; exit; fi
ranks=$SLURM_NTASKS
while [[ "$1" == -* ]]; do
    echo "$1" >> "$NOTES/srun"
    if [ "$1" = -n ]; then ranks=$2; shift; fi
    shift
done
exec "$MPIEXEC" -n "$ranks" "$@"
"""
SCONTROL = """#!/bin/bash
printf 'JobId=%s\\n   Command=%s\\n   WorkDir=/nowhere\\n' "$SLURM_JOB_ID" "$SCRIPT"
"""
pytestmark = [
    pytest.mark.skipif(not SCRIPT.exists(), reason="no checkout: the batch scripts are not installed"),
]


@pytest.fixture
def submit(tmp_path) -> Callable[..., Program]:
    """Return a function that starts the script as slurmd would: a copy in a spool, elsewhere the working directory."""
    tools, spool, submitted = tmp_path / "bin", tmp_path / "spool", tmp_path / "submitted from here"
    for folder in (tools, spool, submitted):
        folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def start(*arguments: str, restarts: str = "0") -> Program:
        copy = spool / "slurm_script"
        shutil.copy(SCRIPT, copy)
        env = {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "NOTES": str(tmp_path),
            "SCRIPT": str(SCRIPT),
            "MPIEXEC": str(launcher.mpiexec()),
            "PYTHON": sys.executable,
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NAME": "train",
            "SLURM_NTASKS": "2",
            "SLURM_CPUS_PER_TASK": "1",
            "MPIDDP_RESTARTS": restarts,
        }
        return Program(["/bin/bash", copy, *arguments], env, cwd=submitted)

    return start


def test_the_warning_before_the_time_limit_saves_a_checkpoint(submit):
    with submit("--epochs", "300") as job:
        job.wait_for("epoch   2/300", timeout_s=60)
        os.kill(job.pid, signal.SIGUSR1)  # --signal=B:USR1 tells the script alone
        done = job.wait(60)
    assert done.rc == 75, done
    with submit("--epochs", "3") as job:
        again = job.wait(60)
    assert again.rc == 0 and "resumed after step" in again.stdout, again


def test_a_rank_that_dies_starts_the_step_again_in_the_same_job(submit):
    with submit("--epochs", "6", restarts="2") as job:
        job.wait_for("epoch 2/6", timeout_s=60)
        os.kill(job.ranks()[-1], signal.SIGKILL)
        done = job.wait(90)
    assert done.rc == 0, done
    assert "mpiddp run: start 2 of at most 3" in done.stderr and "epoch 6/6" in done.stdout, done
