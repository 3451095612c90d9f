"""A process without an MPI library."""

from harness.launcher import job

from mpiddp.mpi.cuda_aware import loaded_libraries


def test_debians_mpich_is_found_and_named(tmp_path):
    """Debian calls it libmpich.so.12; here it is some other library."""
    (tmp_path / "libmpich.so.12").symlink_to(loaded_libraries("libc")[0])
    done = job("init", MPI4PY_LIBMPI="/nowhere/libmpi.so", LD_LIBRARY_PATH=str(tmp_path))
    assert done.rc == 1 and "ln -s /usr/lib/*/libmpich.so.12" in done.stderr, done
    assert "pip install" not in done.stderr, done
