"""The command that tries MPI libraries, with the oldest one."""

from __future__ import annotations

import pytest
from harness.launcher import job

from measure import mpis

pytestmark = [pytest.mark.long, pytest.mark.once]


def test_the_ancestor_of_crays_mpi_trains(tmp_path):
    try:
        mpis.Environment("mpich-3.4", tmp_path).install()
    except mpis.FailedError as error:
        pytest.skip(f"the library cannot be installed: {error}")
    tests = "--ranks 2 tests/distributed/test_init.py tests/faults/test_watchdog_jobs.py"
    command = ("-m", "tests.measure.mpis", "mpich-3.4", "--folder", tmp_path, "--tests", tests)
    done = job(*command, cwd=mpis.ROOT, limit_s=600)
    assert done.rc == 0, done
    library, _, passed, accuracy = done.stdout.strip().splitlines()[-1].strip("| ").split(" | ")
    assert library == "MPICH 3.4.3" and "passed" in passed and "failed" not in passed, done
    assert float(accuracy) > 0.97, done
