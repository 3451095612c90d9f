"""How jobs end: with the reason, soon, when a rank fails or leaves; in silence when all are done, however slowly.

Upper bounds are generous: without the library these jobs hang for ever.
"""

import re
from functools import partial

import pytest
from harness.launcher import job, line_of, side_by_side
from harness.tiers import chosen, thinned

pytestmark = pytest.mark.core

# Of programs/waits: how rank 1 leaves, and the others' wait.
LEFT = {"exit 3": "all_reduce", "exit beside a timer": "new_group"}
CLEAN = [
    *("after the last collective", "among those that never waited for their operations", "slow last words"),
    *("Finalize called by the program, at different times", "an exception at exit", "forked"),
]


@pytest.fixture(scope="module")
def jobs(request):
    serialized = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
    with_settings = {
        "stopped": {"MPIDDP_TIMEOUT": "8"},
        "stopped before MPI_Finalize": {"MPIDDP_TIMEOUT": "8"},
        "without MPI_THREAD_MULTIPLE": serialized,
        "late": serialized,
        "exit code": {"MPIDDP_TIMEOUT": "1e12"},
        "alone": {},
    }
    calls = {way: partial(job, "waits", way, LEFT[way], ranks=3) for way in chosen(request, "left")}
    calls["timeout"] = partial(job, "waits", "sleep after new_group", "all_reduce in new_group", ranks=3, limit_s=40)
    calls |= {case: partial(job, "endings", case, ranks=3, **env) for case, env in with_settings.items()}
    calls |= {case: partial(job, "endings", case, ranks=3, limit_s=90) for case in chosen(request, "case")}
    calls["ends before"] = partial(job, "init", "ends before", ranks=3, limit_s=40)
    calls["starts MPI and ends"] = partial(job, "init", "starts MPI and ends", ranks=3, limit_s=40, MPIDDP_TIMEOUT="2")
    with side_by_side(calls) as futures:
        yield futures


def assert_ended(done, *texts):
    assert done.rc != 0 and done.seconds < 30 and "went on" not in done.stdout, done
    assert all(text in done.stderr for text in texts), done


def said(done):
    lines: dict[int, list[str]] = {}
    for line in done.stderr.splitlines():
        if line.startswith("[rank "):
            name, _, text = line.partition("] ")
            rank, size = name.split()[1].split("/")
            assert size == "3", done
            lines.setdefault(int(rank), []).append(text)
    return lines


def test_exception_ends_job():
    done = job("waits", "raise", "all_reduce", ranks=3, limit_s=40)
    assert_ended(done)
    assert done.rc == 1 and "interrupted" not in done.stderr, done  # as mpirun ends the others
    lines = said(done)[1]
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "ValueError: boom", done
    # In one piece, without others' lines between them.
    block = "".join(f"{line}\n" for line in done.stderr.splitlines() if line.startswith("[rank 1/3"))
    assert block in done.stderr.replace("\r", ""), done


def test_exception_before_init_ends_job_with_its_own_exit_code():
    done = job("init", "an error before", ranks=3, limit_s=40)
    assert_ended(done)
    assert said(done)[1][-1] == "ValueError: boom", done
    assert done.rc == 1 and "BAD TERMINATION" not in done.stderr and "Killed" not in done.stderr, done


@pytest.mark.long
def test_reason_that_cannot_be_told_is_one_too():
    done = job("endings", "a reason that cannot be told", ranks=3, limit_s=40)
    assert_ended(done)
    assert done.rc == 7 and said(done)[1][-1] == "ZeroDivisionError: division by zero", done


def test_same_exception_on_all_ranks_is_printed_once(tmp_path):
    """And is written to no file unasked."""
    done = job("endings", "raise on all", ranks=3, limit_s=40, MPIDDP_FLIGHT_RECORDER=None, TMPDIR=str(tmp_path))
    assert_ended(done)
    # Rank 0 speaks first; the others are ended before their turn unless the machine is very busy.
    assert done.rc == 1 and said(done)[0][-1] == "ValueError: boom", done
    assert "flight recorder" not in done.stderr and not list(tmp_path.glob("mpiddp-*")), done


@pytest.mark.parametrize("left", thinned(LEFT, "exit 3"))
def test_rank_that_left_is_named(jobs, left):
    done = jobs[left].result()
    assert_ended(done)
    reasons = ["\n".join(lines) for lines in said(done).values()]
    assert reasons and all(LEFT[left] in text and "the program of rank 1 has ended" in text for text in reasons), done
    assert all(re.search(r"    rank 1 \(node \S+, pid \d+\) +the program has ended", text) for text in reasons), done
    assert done.rc == 1 and done.seconds > 3, done  # patience


@pytest.mark.long
def test_exception_at_exit_of_a_rank_that_others_need():
    done = job("endings", "a failure in the last words", ranks=3)
    assert_ended(done, "ValueError: boom", "all_reduce #1", "rank 1 has ended")


def test_a_crash_tells_its_rank_and_line():
    done = job("waits", "crash", "all_reduce", ranks=3, limit_s=40)
    assert_ended(done)
    _, crash, stacks = done.stderr.partition("Fatal Python error: Segmentation fault")
    line = f'waits.py", line {line_of("waits", "string_at")} in <module>'
    assert crash and re.search(r"in \[rank 1/3 \S+\]\n", stacks) and line in stacks, done


# A group's timeout: on a busy machine init_process_group takes longer itself.
def test_blocking_operation_times_out(jobs):
    done = jobs["timeout"].result()
    assert_ended(done)
    assert done.rc == 110, done
    # Rank 0 speaks first, unless a busy machine has begun to run rank 2 before.
    (speaker, lines), *_ = said(done).items()
    reason = "\n".join(lines)
    assert (
        "mpiddp.errors.DistTimeoutError: all_reduce #1 of float64 (4,) in the group of all 3 ranks did not finish in"
        " 1.5 s (Timed out):\n  1 rank is NOT in it:\n    rank 1 (node "
    ) in reason, done
    assert re.search(r" rank 1 \(node \S+, pid \d+\)  +waits.py:\d+ in .* since ", reason), done
    assert f"rank {2 - speaker} (node" not in reason, done


# The exit code, if it is sure, and texts.
ENDED = {
    "late": (110, "all_reduce #1"),  # a short call, without MPI_THREAD_MULTIPLE
    "stopped": (110, "its program has ended, and rank 1 has not answered for 8 s"),
    "stopped before MPI_Finalize": (None, "Timeout (0:00:08)", "in finalize"),
    "starts MPI and ends": (None, "init_process_group did not finish in 2 s"),
}


@pytest.mark.parametrize("ended", ENDED)
def test_others_are_kept_for_the_timeout(jobs, ended):
    done, (code, *texts) = jobs[ended].result(), ENDED[ended]
    assert_ended(done, *texts)
    assert code in (None, done.rc), done


def test_rank_that_ends_before_mpi_starts_is_named(jobs):
    done = jobs["ends before"].result()
    assert_ended(done)
    assert done.stderr.count("rank 1 of 3 ended before MPI had started") == 1, done


@pytest.mark.parametrize("case", CLEAN)
def test_job_that_ends_well(jobs, case):
    done = jobs[case].result()
    assert done.rc == 0 and "rank" not in done.stderr, done
    assert done.stdout.count("refused") == (2 if case == "forked" else 0), done


def test_operations_that_nobody_shares_are_named(jobs):
    done = jobs["alone"].result()
    assert done.rc == 0 and "[rank 0/3" in done.stderr and "that no other rank takes part in" in done.stderr, done


def test_without_thread_multiple(jobs):
    done = jobs["without MPI_THREAD_MULTIPLE"].result()
    assert done.rc == 0, done
    warning = "UserWarning: no watchdog runs: MPI runs with MPI_THREAD_SERIALIZED"
    assert done.stderr.count("Warning") == done.stderr.count(warning) == 1 and "[rank " not in done.stderr, done
    assert "a hang inside of MPI is not noticed" in done.stderr, done
    assert done.stdout.count("refused: MPI runs without MPI_THREAD_MULTIPLE here, so only the thread that") == 3, done


def test_exit_code_is_kept_and_a_time_limit_may_be_endless(jobs):
    done = jobs["exit code"].result()
    assert done.rc == 75 and "Error" not in done.stderr, done
