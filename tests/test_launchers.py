"""Launchers, by what they announce in made-up environments."""

import os

import pytest

from mpiddp import launchers

pytestmark = pytest.mark.usefixtures("environ")


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


STEP = "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1"
DAEMON = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0"


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        ("", None),
        (
            "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1",
            ("mpirun (Open MPI)", 2, 4, 1),
        ),
        ("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0", ("mpirun (MPICH, Hydra)", 2, 4, 0)),
        (STEP, ("srun", 3, 4, 1)),
        # srun --mpi=pmi2
        (f"PMI_RANK=3 PMI_SIZE=4 {STEP}", ("srun", 3, 4, 1)),
        # mpirun in a batch job: Slurm's variables are those of the node's daemon
        (f"PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 {DAEMON}", ("mpirun (MPICH, Hydra)", 1, 4, 1)),
        # a batch script outside of a step
        ("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8", None),
        ("PMI_RANK=one PMI_SIZE=4", None),
        ("PMI_RANK=1", None),
    ],
)
def test_launch(monkeypatch, announced, expected):
    monkeypatch.setattr(os, "environ", variables(announced))
    found = launchers.launch()
    assert (found and (found.launcher.name, *found[1:])) == expected


def test_announced_ranks_keep_what_is_set(environ):
    for name, value in {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "LOCAL_RANK": "7"}.items():
        environ.setenv(name, value)
    environ.setenv("RANK", "")  # set, and nothing to read
    launchers.announce_ranks()
    assert launchers.rank_variables() == {"WORLD_SIZE": 4, "LOCAL_RANK": 7}
    launchers.correct_ranks(1, 2, 0)
    assert launchers.rank_variables() == {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0}


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        ("", None),
        ("OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_GTIDS=0,1,2,3", 2),
        ("MPI_LOCALNRANKS=3", 3),
        ("SLURM_GTIDS=8", 1),
        ("SLURM_GTIDS=4,5,6", 3),
    ],
)
def test_local_ranks(monkeypatch, announced, expected):
    monkeypatch.setattr(os, "environ", variables(announced))
    assert launchers.local_ranks() == expected
