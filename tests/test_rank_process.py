"""Programs that a rank has started, in made-up environments."""

import contextlib
import os
import socket

import pytest

from mpiddp import launchers, rank_process, settings

pytestmark = pytest.mark.usefixtures("environ")


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
PRTE = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-vm-7@1"}
STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("rank", "later", "is_rank"),
    [
        (HYDRA, {}, False),
        (HYDRA, {"PMI_FD": "closed"}, False),
        (HYDRA, {"PMI_FD": "file"}, False),  # the number is in use again, for something else
        (HYDRA, {"PMI_FD": "other socket"}, True),  # an mpirun inside the rank
        (PRTE, {}, False),
        (PRTE, {"PMIX_NAMESPACE": "prterun-vm-8@1"}, True),
        (PRTE, {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "other socket"}, True),
        (STEP, {}, False),
        (STEP, {"SLURM_STEP_ID": "1"}, True),
    ],
)
def test_who_inherits_a_launch_is_no_rank(environ, tmp_path, rank, later, is_rank):
    with contextlib.ExitStack() as stack:
        own, other = (stack.enter_context(part) for part in socket.socketpair())
        file = stack.enter_context((tmp_path / "file").open("w"))
        numbers = {"closed": "987654", "file": str(file.fileno()), "other socket": str(other.fileno())}
        for name, value in rank.items():
            environ.setenv(name, value)
        if rank is HYDRA:
            environ.setenv("PMI_FD", str(own.fileno()))
        assert rank_process.started_by_rank() is None
        rank_process.claim_rank()
        assert rank_process.started_by_rank() is None
        rank_pid = os.getpid()
        environ.setattr(os, "getpid", lambda: rank_pid + 1)
        for name, value in later.items():
            environ.setenv(name, numbers.get(value, value))
        assert rank_process.started_by_rank() == (None if is_rank else rank_pid)
        left = settings.outside_of_jobs()
        environ.setattr(os, "environ", left)
        assert launchers.launch() is None and not [name for name in left if name.startswith("MPIDDP_")]


@pytest.mark.parametrize("text", ["x", "", "1 2 3 x", "x y 3"])
def test_mark_that_no_rank_has_left_says_nothing(environ, text):
    environ.setenv("PMI_RANK", "0")
    environ.setenv("PMI_SIZE", "2")
    environ.setenv("MPIDDP_RANK_PROCESS", text)
    assert rank_process.started_by_rank() is None


def test_without_a_launcher_nobody_claims_a_rank(environ):
    before = dict(os.environ)
    rank_process.claim_rank()
    assert dict(os.environ) == before
