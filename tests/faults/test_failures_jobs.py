"""Ranks that are killed, and the others, which go on: with Open MPI's ``mpirun --with-ft ulfm``."""

import json
import os
import time
from functools import partial

import numpy as np
import pytest
from harness import launcher
from harness.launcher import ULFM, Completed, is_open_mpi, side_by_side
from harness.tiers import chosen, thinned

SEED = int(os.environ.get("MPIDDP_TEST_SEED", time.time_ns() % 2**32))
pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not is_open_mpi(), reason="only Open MPI's mpirun lets ranks live on"),
]

# Of programs/survivors: the others' waits when a rank dies.
EVERYDAY = (
    *("short all_reduce", "long all_reduce", "symmetric all_reduce", "all_reduce in MPI", "asynchronous", "isend"),
    *("a group without the victim", "receiving from any", "in the middle of making a group"),
)
STATES = (*EVERYDAY, "receiving after it is known", "asking", "sending", "making a group", "monitored_barrier")


def survive(ranks: int, case: str, victim: int = 1, number: str = "SIGKILL", **env: str) -> Completed:
    return launcher.job("survivors", case, victim, number, ranks=ranks, options=ULFM, limit_s=40, **env)


@pytest.fixture(scope="module")
def jobs(request):
    rng = np.random.default_rng(SEED)
    calls = {}
    for state in chosen(request, "state"):
        ranks = int(rng.integers(2, 5))
        calls[state] = partial(
            survive, ranks, state, rng.integers(ranks), rng.choice(["SIGKILL", "SIGSEGV", "SIGABRT"])
        )
    with side_by_side(calls) as futures:
        yield futures


@pytest.mark.parametrize("state", thinned(STATES, *EVERYDAY))
def test_others_go_on(jobs, state):
    done = jobs[state].result()
    assert done.rc == 0 and "went on" in done.stdout, f"seed {SEED}: {done}"


SHRINK, INIT = "another has ended, shrink_group", "another has ended, init_process_group"


@pytest.mark.parametrize(
    ("case", "ranks", "said"),
    [
        ("several", 5, ["2 is rank 0 of 2", "3 is rank 1 of 2"]),  # two at once, and one while the others regroup
        ("symmetric arrays", 3, ["0 is right", "2 is right"]),  # they go on as ordinary arrays
        ("the last barrier", 3, []),
        ("the old group", 3, ["all said so"] * 2),
        (SHRINK, 4, ["2 is rank 0 of 2", "3 is rank 1 of 2"]),
        pytest.param(INIT, 4, ["2 is rank 0 of 2", "3 is rank 1 of 2"], marks=pytest.mark.long),
    ],
)
def test_ranks_that_are_left_are_right(case, ranks, said):
    done = survive(ranks, case)
    assert done.rc == 0 and sorted(done.stdout.splitlines()) == said, done
    assert "Traceback" not in done.stderr and "Error" not in done.stderr, done


def test_error_that_nobody_catches_ends_the_job():
    done = survive(3, "nobody catches it")
    assert done.rc == 1 and "RankFailedError: rank 1 of 3 died" in done.stderr, done


def test_death_of_a_rank_for_which_the_others_wait_at_their_ends(tmp_path):
    done = survive(3, "waited for at the end", 0, MPIDDP_MARKER=str(tmp_path / "marker"))
    assert done.rc != launcher.TIMED_OUT and done.seconds < 30 and "Traceback" not in done.stderr, done
    assert (tmp_path / "marker").read_text() == "ended", "the survivor that is rank 0 then tells the supervisor"


def test_revoked_group_is_the_news_of_a_failure():
    done = survive(2, "revoked")
    assert done.rc == 0 and done.stdout.count("told: a rank of 2 died") == 2, done


@pytest.mark.parametrize(
    ("options", "coll", "expected"),
    [
        ((), None, "end the job"),
        (ULFM, None, "the others go on"),
        (ULFM, "^sm", "end the job: MPI was started without OMPI_MCA_coll=^han,adapt"),
    ],
)
def test_info_tells_what_becomes_of_the_others(options, coll, expected):
    done = launcher.job("-m", "mpiddp", "info", "--json", ranks=2, options=options, OMPI_MCA_coll=coll)
    assert done.rc == 0 and json.loads(done.stdout)["dead_ranks"].startswith(expected), done
