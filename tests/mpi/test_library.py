"""Facts of MPI libraries, from the texts that they give of themselves."""

import pytest

from mpiddp.mpi import library

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI root@host Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: today"


@pytest.mark.parametrize(("text", "name"), [(OPEN_MPI, "Open MPI v5.0.11"), (MPICH, "MPICH 5.0.2")])
def test_short_name(text: str, name: str) -> None:
    assert library.short_name(text) == name


def test_only_open_mpi_lets_ranks_survive_and_needs_proof_of_its_word() -> None:
    assert library.facts(OPEN_MPI) == (True, False, True, True, False)
    assert library.facts(MPICH) == library.facts("Intel(R) MPI Library 2021") == (False, True, False, False, True)
