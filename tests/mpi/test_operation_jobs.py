"""Operations of several threads, interrupted ones, and ones that are given up: in jobs of their own."""

from __future__ import annotations

from functools import partial

import pytest
from harness.launcher import job, side_by_side
from harness.tiers import chosen, thinned

# Of programs/threads: the words after the case are ASYNC COUNT CALLS.
THREADS = [
    *(("a group each", 0, 8), ("a group each", 0, 300_000), ("a group each", 1, 8, 600), ("a group each", 1, 300_000)),
    *(("beside DDP",), ("overlapping",), ("beside a short call",), ("one group", 0, 8), ("one group", 0, 300_000)),
]
GIVEN_UP = ("all_reduce", "irecv")


@pytest.fixture(scope="module")
def jobs(request):
    calls = {case: partial(job, "threads", *case, ranks=2, limit_s=40) for case in chosen(request, "case")}
    calls |= {way: partial(job, "given_up", way, ranks=3) for way in GIVEN_UP}
    calls["interrupted"] = partial(job, "interrupted", ranks=2, limit_s=40)
    with side_by_side(calls, places=2) as futures:
        yield futures


@pytest.mark.parametrize(
    "case", thinned(THREADS, THREADS[0], *(THREADS[place] for place in (3, 4, 5, 6, 7))), ids=lambda case: str(case[0])
)
def test_threads_in_groups_of_their_own_are_right_and_in_one_are_refused(jobs, case):
    done = jobs[case].result()
    assert done.rc == 0 and done.stdout.count("right") == 2, done
    said = done.stdout.count("is used by two threads at once, whose calls have no order that all ranks share")
    assert said == (case[0] == "one group"), done


def test_interrupt_in_a_step_of_another_operation_is_raised_at_once(jobs):
    done = jobs["interrupted"].result()
    assert "0 interrupted" in done.stdout, done


def test_group_is_made_beside_an_operation_without_thread_multiple():
    done = job("group_beside_work", ranks=2, limit_s=25, MPI4PY_RC_THREAD_LEVEL="serialized")
    assert done.rc == 0 and done.stdout.count("right") == 2, done


@pytest.mark.parametrize("way", GIVEN_UP)
def test_a_program_that_gives_up_an_operation_ends_as_any_other(jobs, way):
    done = jobs[way].result()
    assert done.rc == 0 and done.seconds < 40, done
    assert done.stdout.count("caught") == done.stdout.count("refused") == 2, done
    assert "asynchronous operations that no other rank takes part in" in done.stderr, done
