"""Operations of several threads, interrupted ones, and ones that are given up: in jobs of their own."""

from functools import partial

import pytest
from harness.launcher import job, side_by_side

# Of programs/threads: the words after the case are ASYNC COUNT.
THREADS = [
    *(("a group each", 0, 8), ("a group each", 1, 300_000)),
    *(("beside DDP",), ("overlapping",), ("beside a short call",), ("one group",), ("after the main thread",)),
]


@pytest.fixture(scope="module")
def jobs():
    calls = {case: partial(job, "threads", *case, ranks=2, limit_s=40) for case in THREADS}
    calls["given up"] = partial(job, "given_up", ranks=3)
    calls["interrupted"] = partial(job, "interrupted", ranks=2, limit_s=40)
    with side_by_side(calls, places=2) as futures:
        yield futures


@pytest.mark.parametrize("case", THREADS, ids=lambda case: str(case[0]))
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


def test_a_program_that_gives_up_an_operation_ends_as_any_other(jobs):
    done = jobs["given up"].result()
    assert done.rc == 0 and done.seconds < 40, done
    assert done.stdout.count("caught") == done.stdout.count("refused") == 4, done
    assert "asynchronous operations that no other rank takes part in" in done.stderr, done
