"""A process without an MPI library."""

import pytest
from harness.launcher import job


@pytest.mark.parametrize("ranks", [None, 2])
def test_no_library(ranks, tmp_path):
    (nothing := tmp_path / "libmpi.so").write_text("")
    done = job("init", ranks=ranks, MPI4PY_LIBMPI=str(nothing), MPI4PY_MPIABI="impi")
    assert done.rc not in (0, 124), done
    cures = "pip install 'mpiddp[mpich]'", "module load", "ln -s /usr/lib/*/libmpich.so.12"
    assert all(done.stderr.count(cure) == 1 for cure in cures), done
