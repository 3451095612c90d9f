"""Processes that ranks start, by multiprocessing or as commands, are no ranks."""

import re

import pytest
from harness.launcher import SHARED, job, mpiexec
from harness.tiers import thinned

pytestmark = pytest.mark.core


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_spawn_that_was_left_in(method):
    done = job("children", "spawn", method, ranks=2, limit_s=50)
    assert done.rc not in (0, 124), done
    assert done.stderr.count("delete the spawn") == 1 and "has started all 2 of them" in done.stderr, done
    assert "went on" not in done.stdout and "PMIU" not in done.stderr and "Fatal error" not in done.stderr, done


def test_a_process_that_imports_the_program_again_is_no_rank():
    """It has its parent's launcher variables, and must not join the job in its place."""
    done = job("children", "process", "spawn", ranks=2)
    assert done.rc == 0 and "the child failed: True" in done.stdout and done.stdout.count("sum 2.0") == 2, done
    assert done.stderr.count("under `if __name__ == '__main__':`") == 1, done


@pytest.mark.parametrize("method", thinned(["spawn", "forkserver"], "spawn"))
def test_a_pool_of_processes_that_import_the_program_again_ends_the_job(method):
    """A Pool replaces failing workers without end."""
    done = job("children", "pool", method, ranks=2, limit_s=30)
    assert done.rc not in (0, 124), done
    assert 1 <= done.stderr.count("under `if __name__ == '__main__':`") <= 4, done
    semaphores = re.findall(r"/(mp-\w+)", done.stdout)
    assert semaphores and not [name for name in semaphores if (SHARED / f"sem.{name}").exists()], done


def test_a_program_that_a_rank_starts_is_no_rank():
    """Directly, with the rank's files or by a shell; the cure in its text works, alone and as a job."""
    done = job("children", "commands", mpiexec(), ranks=2)
    assert done.rc == 0 and done.stdout.count("sum 2.0") == 2, done
    for name in ("child", "with files", "by a shell"):
        assert f'{name}: 1 [] False ["mpiddp.errors.SetupError: rank 1 of 2 (process ' in done.stdout, done
    assert done.stdout.count("with `env=mpiddp.settings.outside_of_jobs()`") == 3, done
    assert "alone: 0 ['world', 'of', '1'] False" in done.stdout, done
    assert "job: 0 ['world', 'of', '2', 'world', 'of', '2'] False" in done.stdout, done
    # Python's own traceback and exit code: it is no rank.
    assert "raises: 1 [] False ['ZeroDivisionError: division by zero']" in done.stdout, done
