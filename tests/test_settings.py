"""Settings from made-up environments."""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import socket
from pathlib import Path

import pytest

from mpiddp import settings


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """Start each test from an environment without launchers and settings."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MPIDDP_",
        "PMI",
        "OMPI_",
        "SLURM_",
        "MPI_LOCAL",
        *settings.THREAD_VARIABLES,
    )
    for name in list(os.environ):
        if name.startswith(names):
            monkeypatch.delenv(name)
    return monkeypatch


def test_examples():
    assert doctest.testmod(settings).failed == 0


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        ({}, None),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            ("mpirun (Open MPI)", 2, 4, 1),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, ("mpirun (MPICH, Hydra)", 2, 4, 0)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}, ("srun", 3, 4, 1)),
        # srun --mpi=pmi2
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"},
            ("srun", 3, 4, 1),
        ),
        # mpirun in a batch job: Slurm's variables are those of the node's daemon
        (
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "4",
                "MPI_LOCALRANKID": "1",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_LOCALID": "0",
            },
            ("mpirun (MPICH, Hydra)", 1, 4, 1),
        ),
        # a batch script outside of a step
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, None),
        ({"PMI_RANK": "one", "PMI_SIZE": "4"}, None),
        ({"PMI_RANK": "1"}, None),
    ],
)
def test_launch(monkeypatch, announced, expected):
    monkeypatch.setattr(os, "environ", announced)
    assert settings.launch() == expected


def test_announced_ranks_keep_what_is_set(environ):
    for name, value in {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "LOCAL_RANK": "7"}.items():
        environ.setenv(name, value)
    environ.setenv("RANK", "")  # set, and nothing to read
    settings.announce_ranks()
    assert settings.rank_variables() == {"WORLD_SIZE": 4, "LOCAL_RANK": 7}
    settings.correct_ranks(1, 2, 0)
    assert settings.rank_variables() == {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0}


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "4"}, 2),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "3"}, None),
    ],
)
def test_local_ranks(monkeypatch, announced, expected):
    monkeypatch.setattr(os, "environ", announced)
    assert settings.local_ranks() == expected


@pytest.mark.parametrize(
    ("mine", "launchers", "ranks", "expected"),
    [
        (16, 16, 4, 4),  # one mask for all: divided
        (16, 16, 5, 3),
        (2, 2, 4, 1),  # more ranks than cores
        (4, 16, 4, 4),  # each rank has its own cores
        (1, 16, 16, 1),
        (8, 16, 4, 4),  # two ranks have one half
        (8, 8, 1, 8),
    ],
)
def test_limit_blas_threads(environ, mine, launchers, ranks, expected):
    environ.setattr(os, "sched_getaffinity", lambda pid: set(range(launchers if pid else mine)), raising=False)
    environ.setenv("PMI_RANK", "0")
    environ.setenv("PMI_SIZE", str(2 * ranks))
    environ.setenv("MPI_LOCALNRANKS", str(ranks))
    for name in settings.THREAD_VARIABLES:
        environ.setenv(name, "")  # so that the fixture takes away what is set
        environ.delenv(name)
    assert settings.limit_blas_threads() == expected
    assert {os.environ[name] for name in settings.THREAD_VARIABLES} == {str(expected)}
    assert settings.blas_threads() == expected
    assert settings.limit_blas_threads() is None


def test_limit_blas_threads_without_launcher(environ):
    environ.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    for name in settings.THREAD_VARIABLES:
        environ.setenv(name, "")
        environ.delenv(name)
    assert settings.limit_blas_threads() == 6


@pytest.mark.parametrize("name", settings.THREAD_VARIABLES)
def test_limit_blas_threads_leaves_the_users_choice_alone(environ, name):
    environ.setenv(name, "3")
    assert settings.limit_blas_threads() is None
    assert [os.environ.get(each) for each in settings.THREAD_VARIABLES].count(None) == 2


def test_values(environ):
    assert settings.pretended_nodes() is None
    assert settings.default_timeout_s() == 1800
    assert settings.debug_level() == "OFF"
    assert settings.takes_device_pointers() is None
    environ.setenv("MPIDDP_NODES", "0,0,1")
    environ.setenv("MPIDDP_TIMEOUT", "2.5")
    environ.setenv("MPIDDP_DEBUG", "detail")
    environ.setenv("MPIDDP_CUDA_AWARE", "0")
    assert settings.pretended_nodes() == (0, 0, 1)
    assert settings.default_timeout_s() == 2.5
    assert settings.debug_level() == "DETAIL"
    assert settings.takes_device_pointers() is False


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("MPIDDP_NODES", settings.pretended_nodes),
        ("MPIDDP_TIMEOUT", settings.default_timeout_s),
        ("MPIDDP_DEBUG", settings.debug_level),
        ("MPIDDP_CUDA_AWARE", settings.takes_device_pointers),
        ("MPIDDP_DETERMINISTIC", settings.deterministic),
    ],
)
def test_nonsense_is_named(environ, name, read):
    environ.setenv(name, "nonsense")
    with pytest.raises(ValueError, match=rf"{name} must be .*(nonsense|NONSENSE)"):
        read()


def test_unknown_variables_are_told_with_the_nearest(environ):
    for name in ("MPIDDP_TIMEOUT", "MPIDDP_TEST_SEED", "MPIDDP_LAUNCH", "MPIDDP_MARKER"):
        environ.setenv(name, "1")
    assert settings.unknown_variables() == []
    for name in ("MPIDDP_WARNAFTER", "MPIDDP_XYZ"):
        environ.setenv(name, "1")
    near, far = settings.unknown_variables()
    assert near.startswith("MPIDDP_WARNAFTER is set") and near.endswith("did you mean MPIDDP_WARN_AFTER?")
    assert "MPIDDP_XYZ" in far and far.endswith("MPIDDP_TIMEOUT, MPIDDP_WARN_AFTER")


def test_every_variable_of_the_package_is_known_and_documented(environ):
    package = Path(settings.__file__).parent
    for file in [*package.rglob("*.py"), *package.rglob("*.md")]:
        for name in re.findall(r"MPIDDP_(?!TEST)[A-Z_]*[A-Z]", file.read_text()):
            environ.setenv(name, "1")
    assert not settings.unknown_variables()
    described = re.findall(r"^\| `(MPIDDP_\w+)` \|", (package / "distributed/README.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted(settings._VARIABLES)


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf"])
def test_a_timeout_that_is_none(environ, text):
    environ.setenv("MPIDDP_TIMEOUT", text)
    with pytest.raises(ValueError, match=rf"MPIDDP_TIMEOUT must be .*{text}"):
        settings.default_timeout_s()


@pytest.mark.parametrize(("text", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_switches(environ, text, expected):
    name = "MPIDDP_DETERMINISTIC"
    environ.delenv(name, raising=False) if text is None else environ.setenv(name, text)
    assert settings.deterministic() is expected


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
        assert settings.started_by_rank() is None
        settings.claim_rank()
        assert settings.started_by_rank() is None
        rank_pid = os.getpid()
        environ.setattr(os, "getpid", lambda: rank_pid + 1)
        for name, value in later.items():
            environ.setenv(name, numbers.get(value, value))
        assert settings.started_by_rank() == (None if is_rank else rank_pid)
        left = settings.outside_of_jobs()
        environ.setattr(os, "environ", left)
        assert settings.launch() is None and not [name for name in left if name.startswith("MPIDDP_")]


@pytest.mark.parametrize("text", ["x", "", "1 2 3 x", "x y 3"])
def test_mark_that_no_rank_has_left_says_nothing(environ, text):
    environ.setenv("PMI_RANK", "0")
    environ.setenv("PMI_SIZE", "2")
    environ.setenv("MPIDDP_RANK_PROCESS", text)
    assert settings.started_by_rank() is None


def test_without_a_launcher_nobody_claims_a_rank(environ):
    before = dict(os.environ)
    settings.claim_rank()
    assert dict(os.environ) == before
