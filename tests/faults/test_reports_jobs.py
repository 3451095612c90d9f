"""A warning before the timeout, and `python -m mpiddp where`, name the ranks that delay an operation."""

import os
import re
import signal
import time
from functools import partial

import pytest
from harness.launcher import Completed, job, side_by_side, start
from harness.tiers import chosen, thinned

# Of programs/waits: the wait of ranks 0 and 2 while rank 1 is in its own code, and its text.
WAITS = {
    "long all_reduce": "all_reduce #2 of float64 (200000,)",  # in MPI
    "all_reduce": "all_reduce #2 of float64 (4,)",  # spinning
}
PATIENCE = {"MPIDDP_WARN_AFTER": "1.5"}


def warned(folder, wait) -> Completed:
    release = folder / f"release {wait}"
    with start("waits", "save", wait, release, ranks=3, **PATIENCE) as job:
        job.wait_for(" without progress", 60)
        job.wait_for("next warning in 6 s", 60)
        release.touch()
        return job.wait(60)


def stopped() -> Completed:
    with start("waits", "SIGSTOP", "all_reduce", "unused", ranks=3, **PATIENCE) as job:
        job.wait_for(" without progress", 60)
        job.wait_for("next warning", 60)
        os.kill(job.pid_of(1), signal.SIGCONT)
        return job.wait(60)


def asked(folder) -> tuple[Completed, Completed, Completed]:
    """Ask a job of which rank 1 is in its own code, by the command and by a signal; without warnings."""
    release, env = folder / "release", {"MPIDDP_WARN_AFTER": "0", "MPIDDP_FLIGHT_RECORDER": f"{folder}/asked/rank_"}
    with start("waits", "save", "long all_reduce", release, ranks=3, **env) as asked:
        asked.wait_for("pid of ", times=3)
        time.sleep(1)
        name = f"{os.uname().nodename}.{asked.pid_of(0)}"
        answer = job("-m", "mpiddp", "where", name)
        os.kill(asked.pid_of(2), signal.SIGUSR2)
        asked.wait_for(f"mpiddp: job {name}, 3 ranks")
        asked.wait_for("flight recorder: ")
        release.touch()
        ended = asked.wait(60)
    return answer, ended, job("-m", "mpiddp", "where", name)


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("stalls")
    calls = {wait: partial(warned, tmp_path, wait) for wait in chosen(request, "wait")}
    calls |= {"stopped": stopped, "asked": partial(asked, tmp_path)}
    calls["circle"] = partial(job, "circle", ranks=3, MPIDDP_WARN_AFTER="2", MPIDDP_TIMEOUT="5")
    with side_by_side(calls) as futures:
        yield futures


@pytest.mark.parametrize("wait", thinned(WAITS, "all_reduce"))
def test_a_rank_in_its_own_code_is_named_with_its_line(jobs, wait) -> None:
    job, operation = jobs[wait].result(), WAITS[wait]
    assert job.rc == 0, job
    reports = [part for part in job.stderr.split("mpiddp: ") if " without progress" in part]
    assert 2 <= len(reports) <= 4, job
    for report in reports:
        assert operation in report and "in the group of all 3 ranks" in report, job
        assert "  1 rank is NOT in it:\n    rank 1 (node " in report, job
        assert re.search(r"2 ranks wait in it at \S+:\d+ in <module> \(0, 2\)", report), job
        assert "error at 30 min. Stacks of all ranks: python -m mpiddp where" in report, job
    # On a busy machine rank 1 may not have come there before the first one.
    assert re.search(
        r" in save +\d+ s since its last call \(all_reduce #1 of 4 float64 elements with SUM\)", reports[1]
    ), job
    assert "next warning in 3 s" in reports[0] and "next warning in 6 s" in reports[1], job


def test_a_stopped_rank_does_not_answer(jobs) -> None:
    job = jobs["stopped"].result()
    assert job.rc == 0, job
    why = "its process is stopped, by SIGSTOP; its last call here: all_reduce #1 of 4 float64"
    assert re.search(rf"rank 1 \(node \S+, pid \d+\) +no answer: {why}", job.stderr), job


def test_a_circle_of_messages_and_collectives_is_called_a_deadlock(jobs) -> None:
    job = jobs["circle"].result()
    chain = "rank 0 waits for rank 1, which waits for rank 2, which waits for rank 0: a deadlock"
    reports = [part for part in job.stderr.split("mpiddp: ") if " without progress" in part]
    assert len(reports) == 1 and reports[0].splitlines()[0].endswith(f"without progress.  {chain}"), job
    # The timeout says the same, whichever ranks come to print.
    timeout = re.search(rf"\[rank (\d+)/.* did not finish in 5 s.*: {chain}\n(?s:.*)", job.stderr)
    assert job.rc == 110 and timeout, job
    for rank, name in enumerate(["all_reduce", "recv", "barrier"]):
        line = rf" rank {rank} \(node .*  circle.py:\d+ in <module> +in {name} "
        assert re.search(line, reports[0]), (rank, job)
        assert rank == int(timeout[1]) or re.search(line, timeout[0]), (rank, job)


def test_where_and_the_signal_print_all_ranks_and_their_stacks(jobs) -> None:
    answer, job, after = jobs["asked"].result()
    assert answer.rc == 0 and job.rc == 0, (answer, job)
    for text in (answer.stdout, job.stderr):
        assert "3 ranks\n" in text, text
        assert re.search(r"rank 1 \(node \S+, pid \d+\)  +\S+:\d+ in save  .* since its last call \(all_red", text), (
            text
        )
        assert re.search(r"ranks 0, 2 \(node .* in <module>  +in all_reduce #2 of float64 \(200000,\)", text), text
        assert re.search(r"flight recorder: 3 of 3 ranks wrote \S+/asked/rank_\*", text), text
        assert ", in save\n" in text and ", in all_reduce\n" in text, text
    assert "without progress" not in job.stderr, job
    assert after.rc != 0 and "no job" in after.stderr, after
