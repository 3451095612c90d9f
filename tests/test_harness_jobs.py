"""The harness itself: pytest's output when ranks fail, part, or hang; each case a small suite of its own."""

import re
import shutil
import time
from pathlib import Path

import pytest
from harness import launcher

HERE = Path(__file__).parent
HEADER = """
import os, sys, time
import pytest
pytestmark = pytest.mark.mpi
is_rank = "harness.ranks" in sys.modules
if is_rank:
    from mpi4py import MPI
    world = MPI.COMM_WORLD
"""
FAST = {"MPIDDP_TEST_LIMIT": "3", "MPIDDP_TEST_GRACE": "1"}


@pytest.fixture
def suite(tmp_path):
    """Return a function that runs pytest on a suite of one file with ``tests``, marked as ``mpi``."""
    shutil.copytree(HERE / "harness", tmp_path / "tests" / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    # Without the process group.
    conftest = (HERE / "conftest.py").read_text().replace(', "harness.world"', "")
    (tmp_path / "tests" / "conftest.py").write_text(conftest)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')

    def run(tests: str, *args: str, env: dict[str, str | None] | None = None):
        (tmp_path / "tests" / "test_sample.py").write_text(HEADER + tests)
        command = ("-m", "pytest", "-p", "no:cacheprovider", *args)
        return launcher.job(*command, cwd=tmp_path, limit_s=120, **(env or {}))

    return run


def test_one_failing_rank_fails_the_test_and_the_next_is_run(suite):
    tests = """
def test_fails():
    print("printed by", world.rank)
    assert world.rank != 1, "not me"

def test_differs():
    assert world.rank < 1, f"rank {world.rank} says no"

class TestClass:
    @pytest.mark.parametrize("n", [1, 2])
    def test_next(self, n): world.Barrier()

@pytest.mark.mpi(min_size=4)
def test_min(): raise AssertionError

@pytest.mark.mpi_skip
def test_skip(): raise AssertionError
"""
    done = suite(tests, "--ranks", "3", "-v")
    assert done.rc == 1, done
    assert "test_fails[np=3] (rank 1 of 3)" in done.stdout, done
    assert "AssertionError: not me" in done.stdout, done
    assert "printed by 1" in done.stdout, done
    assert "no failure on ranks 0, 2" in done.stdout, done
    assert "rank 1 says no" in done.stdout, done
    assert "rank 2 says no" in done.stdout, done
    assert "::TestClass::test_next[2][np=3] PASSED" in done.stdout, done
    assert "2 failed, 2 passed, 2 skipped" in done.stdout.splitlines()[-1], done


def test_ranks_that_part_or_hang_end_with_all_their_stacks(suite):
    tests = """
def wait_for(source):
    world.recv(source=source)

def test_parts():
    assert world.rank != 1, "not me"
    world.Barrier()

def test_deadlock():
    while world.rank == 0:
        pass
    wait_for(0)

def test_next():
    world.Barrier()
"""
    # With CI set, pytest does not shorten its summary: every stack appears once all the same.
    done = suite(tests, "--ranks", "2", env={**FAST, "CI": "true"})
    assert done.rc == 1, done
    assert "AssertionError: not me" in done.stdout, done
    for function, ranks in (("test_parts", "0"), ("wait_for", "1"), ("test_deadlock", "0")):
        here = re.findall(rf"\[rank (\d)/2 .*\] is here.*\n.*\n.*in {function}", done.stdout)
        assert sorted(here) == list(ranks), f"{function}: {here}\n{done}"
    assert re.search(r"^FAILED .*test_deadlock.* - the ranks do not come together", done.stdout, re.M), done
    assert "2 failed, 1 passed" in done.stdout.splitlines()[-1], done


def test_dead_rank_fails_the_test_and_the_next_is_run(suite):
    tests = """
if is_rank and world.rank == 0:
    from harness.ranks import Ranks
    tell = Ranks.tell
    # Slower than the rank that dies.
    Ranks.tell = lambda self, **event: (time.sleep(0.3 * ("started" in event)), tell(self, **event))

@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), 9), lambda: os._exit(0)])
def test_dies(end):
    if world.rank == 1:
        end()
    world.Barrier()

def test_spoils_the_job(request):
    if world.rank == 1:
        request.config.pluginmanager.get_plugin("ranks").give_up("spoilt")
    world.Barrier()

def test_next():
    world.Barrier()
"""
    done = suite(tests, "--ranks", "2")
    assert done.rc == 1, done
    assert len(re.findall(r"^FAILED .*::test_dies", done.stdout, re.M)) == 2, done
    assert re.search(r"^FAILED .*::test_spoils", done.stdout, re.M) and "come together: spoilt" in done.stdout, done
    assert "3 failed, 1 passed" in done.stdout.splitlines()[-1], done


def test_skipping_everything_is_a_failure(suite):
    done = suite("@pytest.mark.mpi(min_size=5)\ndef test_big(): pass\n", "--ranks", "2")
    assert done.rc not in (0, launcher.TIMED_OUT) and "MPI tests were skipped" in done.stdout, done


LAUNCH_FILE = """
import os, time
from pathlib import Path
import pytest

pytestmark = pytest.mark.launch

def test_waits_for_the_other_file():
    print("printed by {own}")
    Path("{own}").touch()
    end = time.monotonic() + 30
    while not Path("{other}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)

def test_fails():
    print("printed by the second of {own}")
    assert "{own}" != "two", "not me"

def test_ends():
    if "{own}" == "two":
        os._exit(3)

def test_next(): pass
"""


def test_files_that_start_launchers_run_side_by_side(suite, tmp_path):
    for own, other in (("one", "two"), ("two", "one")):
        (tmp_path / "tests" / f"test_{own}_jobs.py").write_text(LAUNCH_FILE.format(own=own, other=other))
    done = suite("", "-m", "launch", "--at-once", "2", "--color=no")
    assert done.rc == 1 and "3 failed, 5 passed" in done.stdout.splitlines()[-1], done
    assert "AssertionError: not me" in done.stdout, done
    # Of the failed test, and in no other process.
    assert re.findall("^printed by .*$", done.stdout, re.M) == ["printed by the second of two"], done
    said = "the process of test_two_jobs.py ended before it told of this test: exit code 3"
    assert done.stdout.count(said) >= 2, done


def test_program_leaves_no_process():
    code = """
import subprocess, time
subprocess.Popen(["sleep", "60"], start_new_session=True)
print("up", flush=True)
time.sleep(60)
"""
    with launcher.start(code, ranks=2) as program:
        program.wait_for("up\nup")
        end = time.monotonic() + 10
        # A process has no environment for a moment after its start.
        while len(program.members()) < 5 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(program.members()) >= 5, "the launcher, two ranks, two sleepers"
    assert program.members() == []
