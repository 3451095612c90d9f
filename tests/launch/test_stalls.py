"""A warning before the timeout, and `python -m mpiddp where`, name the ranks that delay an operation."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from functools import partial

import pytest
from harness.launcher import Completed, mpirun, python, side_by_side, start
from harness.tiers import chosen, thinned

PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpiddp as dist

dist.init_process_group()
rank, x, long = dist.get_rank(), np.ones(4), np.ones(200_000)
dist.all_reduce(x)

def save():
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not os.path.exists(sys.argv[1]):
        time.sleep(1e-3)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

sys.stdout.write(f"pid of {rank}: {os.getpid()}.\\n")
sys.stdout.flush()
"""
# Rank 1's action, and the others' wait.
BODIES = {
    "blocked in MPI": ("save()", "dist.all_reduce(long)", "all_reduce #2 of float64 (200000,)"),
    "spinning": ("save()", "dist.all_reduce(x)", "all_reduce #2 of float64 (4,)"),
    "polling": ("save()", "dist.all_reduce(long, async_op=True).wait()", "all_reduce #2 of float64 (200000,)"),
    "in a barrier": ("save()", "dist.barrier()", "barrier #2 in"),
}
PATIENCE = {"MPIDDP_WARN_AFTER": "1.5"}


def warned(tmp_path, name) -> Completed:
    missing, call, _ = BODIES[name]
    release = tmp_path / f"release {name}"
    with start(3, f"{PROGRAM}\nif rank == 1:\n    {missing}\n{call}\n", str(release), env=PATIENCE) as job:
        job.wait_for(" without progress", 60)
        job.wait_for("next warning in 6 s", 60)
        release.touch()
        return job.wait(60)


def stopped(tmp_path) -> Completed:
    with start(3, PROGRAM + "if rank == 1:\n    stop()\ndist.all_reduce(x)\n", "unused", env=PATIENCE) as job:
        job.wait_for(" without progress", 60)
        job.wait_for("next warning", 60)
        os.kill(_pid(job, 1), signal.SIGCONT)
        return job.wait(60)


def asked(tmp_path) -> tuple[Completed, Completed, Completed]:
    """Ask a job of which rank 1 is in its own code, by the command and by a signal; without warnings."""
    release, quiet = tmp_path / "release", {"MPIDDP_WARN_AFTER": "0"}
    body = "if rank == 1:\n    save()\ndist.all_reduce(long)\n"
    with start(3, PROGRAM + body, str(release), env=quiet) as job:
        for rank in range(3):
            job.wait_for(f"pid of {rank}: ")
        time.sleep(1)
        name = f"{os.uname().nodename}.{_pid(job, 0)}"
        answer = python(None, "-m", "mpiddp", "where", name)
        os.kill(_pid(job, 2), signal.SIGUSR2)
        job.wait_for(f"mpiddp: job {name}, 3 ranks")
        job.wait_for("thread MainThread")
        release.touch()
        ended = job.wait(60)
    return answer, ended, python(None, "-m", "mpiddp", "where", name)


# Calls that do not end before rank {0} comes.
CALLS = {
    "recv": "dist.recv(x, {0})",
    "send": "dist.send(np.ones(1 << 21), {0})",
    "irecv": "dist.irecv(x, {0}).wait()",
    "batch_isend_irecv": "dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, {0})])[0].wait()",
    "barrier": "dist.barrier(groups[{1}])",
    "all_reduce": "dist.all_reduce(np.ones(100_000), group=groups[{1}], async_op=True).wait()",
    "broadcast": "dist.broadcast(x, {0}, group=groups[{1}])",
}
COLLECTIVES = ("barrier", "all_reduce", "broadcast")


def deadlocked(seed: int, size: int) -> tuple[Completed, list[tuple[int, str]]]:
    """Run ranks of which some wait in a circle, and the others with them; return the circle's ranks with their calls.

    Seed 0: a message, a barrier and a collective.
    """
    dice = random.Random(seed)
    ranks = dice.sample(range(size), dice.randint(2, size) if seed else size)
    others, circle, groups, branches = [rank for rank in range(size) if rank not in ranks], [], [], {}
    for index, (rank, awaited) in enumerate(zip(ranks, ranks[1:] + ranks[:1], strict=True)):
        name = dice.choice(list(CALLS)) if seed else ("recv", "barrier", "all_reduce")[index]
        with_it = [others.pop() for _ in others[:] if name in COLLECTIVES and dice.random() < 0.3]
        circle.append((rank, name))
        branches |= dict.fromkeys([rank, *with_it], CALLS[name].format(awaited, len(groups)))
        groups.append([rank, awaited, *with_it])
    branches |= {rank: CALLS["recv"].format(dice.choice(ranks)) for rank in others}
    lines = [f"groups = [dist.new_group(ranks) for ranks in {groups}]", "dist.barrier()"]
    lines += [f"if rank == {rank}: {call}" for rank, call in branches.items()]
    settings = {"MPIDDP_WARN_AFTER": "2", "MPIDDP_TIMEOUT": "5"}
    return mpirun(size, PROGRAM + "\n".join(lines), "unused", env=settings), circle


def assert_circle(job: Completed, circle: list[tuple[int, str]]) -> None:
    start = circle.index(min(circle))
    first, *rest = [f"rank {rank}" for rank, _ in [*circle[start:], *circle[: start + 1]]]
    chain = f"{first} waits for {', which waits for '.join(rest)}: a deadlock"
    reports = [part for part in job.stderr.split("mpiddp: ") if " without progress" in part]
    assert len(reports) == 1 and reports[0].splitlines()[0].endswith(f"without progress.  {chain}"), job
    for rank, name in circle:
        name = name.removeprefix("batch_isend_")
        assert re.search(rf" rank {rank} \(node .*  program.py:\d+ in <module> +in {name} ", reports[0]), (rank, job)
    # The timeout says the same, whichever ranks come to print.
    timeout = re.search(rf"\[rank (\d+)/.* did not finish in 5 s.*: {chain}\n(?s:.*)", job.stderr)
    assert job.rc == 110 and timeout, job
    for rank in {rank for rank, _ in circle} - {int(timeout[1])}:
        known = rf" rank {rank} \(node .*  program.py:\d+ in <module> +in "
        assert re.search(known, timeout[0]), (rank, job)


def _pid(job, rank: int) -> int:
    found = re.search(rf"pid of {rank}: (\d+)\.", "".join(job.output))
    assert found, job.output
    return int(found[1])


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("stalls")
    calls = {name: partial(warned, tmp_path, name) for name in chosen(request, "name")}
    calls |= {"stopped": partial(stopped, tmp_path), "asked": partial(asked, tmp_path)}
    with side_by_side(calls | {"deadlocked": partial(deadlocked, 0, 3)}) as futures:
        yield futures


@pytest.mark.parametrize("name", thinned(BODIES, "blocked in MPI", "spinning"))
def test_a_rank_in_its_own_code_is_named_with_its_line(jobs, name) -> None:
    job, (_, _, operation) = jobs[name].result(), BODIES[name]
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
    assert_circle(*jobs["deadlocked"].result())


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 13))
def test_random_circles(seed) -> None:
    assert_circle(*deadlocked(seed, random.Random(seed).randint(2, 8)))


def test_where_and_the_signal_print_all_ranks_and_their_stacks(jobs) -> None:
    answer, job, after = jobs["asked"].result()
    assert answer.rc == 0 and job.rc == 0, (answer, job)
    for text in (answer.stdout, job.stderr):
        assert "3 ranks\n" in text, text
        assert re.search(r"rank 1 \(node \S+, pid \d+\)  +\S+:\d+ in save  .* since its last call \(all_red", text), (
            text
        )
        assert re.search(r"ranks 0, 2 \(node .* in <module>  +in all_reduce #2 of float64 \(200000,\)", text), text
        assert ", in save\n" in text and ", in all_reduce\n" in text, text
    assert "without progress" not in job.stderr, job
    assert after.rc != 0 and "no job" in after.stderr, after


def test_nonsense_is_refused() -> None:
    job = python("from mpiddp import settings; settings.warn_after_s()", env={"MPIDDP_WARN_AFTER": "soon"})
    assert "MPIDDP_WARN_AFTER must be a number of seconds, or 0 for no warnings; got 'soon'" in job.stderr, job
