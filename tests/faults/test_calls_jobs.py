"""Ranks that disagree in blocking calls, and between nodes: the job ends soon, with an error that names both sides."""

import re
import signal
from functools import partial

import pytest
from harness import hosts
from harness.launcher import is_open_mpi, job, line_of, side_by_side
from harness.tiers import chosen, thinned
from measure import disagreeing

# Of programs/disagree: the rank that comes later, and the texts for most ranks' call and for the last one's.
CASES = {
    "operation": (0, "all_reduce #1 of 4 float32", "barrier #1"),
    "count": (2, "all_reduce #1 of 4 ", "all_reduce #1 of 300000"),
    "group": (0, "new_group #1", "all_reduce #1"),
    "algorithm": (2, " calls all_reduce #", "rank 2 calls all_reduce by ring #"),
}
DTYPES = "rank 0 calls all_reduce #1 of 4 float32 elements with SUM, rank 2 calls all_reduce #1 of 4 int32"
ROOT = "rank 0 calls broadcast #1 of 4 float32 elements and group rank 0 as root, rank 2 calls all_gather #1"
STAYED = ("0,0,1", "a root that went on", "")
# Between nodes, in algorithms that compare nothing: what follows, and the text.
BETWEEN_NODES = {
    ("0,0,1", "dtype", "barrier"): DTYPES,
    ("0,1,2", "dtype", "long all_reduce"): DTYPES,
    ("0,0,1", "dtype", "fast loop"): "disagree: rank",  # with both calls, or the range of calls long gone
    STAYED: ROOT,
}
# The last calls of a job, which nobody waits for: variables, and texts for both sides. Without eager buffers a root may
# wait inside of MPI, where no rank can raise.
ROOTS = ["calls broadcast #1 of 4 float32 elements and group rank"]
LAST = {
    "a sub-group's": (
        {"MPIDDP_NODES": "0,1,2"},
        ["rank 0 calls all_reduce #", "rank 1 calls all_reduce #", "of 600 float64", "of 700 float64"],
    ),
    "messages": ({"MPIDDP_NODES": "0,1,2"}, ["rank 0 calls scatter #1", "rank 1 calls gather #1"]),
    "own roots": ({}, ROOTS),
    "own roots, without eager buffers": ({"MPIDDP_EAGER": "0"}, ROOTS),
}


@pytest.fixture(scope="module")
def jobs(request):
    disagree = partial(job, "disagree", ranks=3, limit_s=40)
    calls = {name: partial(disagree, name, "barrier", late) for name, (late, *_) in CASES.items()}
    calls["caught"] = partial(disagree, "caught", "", 2, MPIDDP_EAGER="0")
    for case in chosen(request, "case"):
        nodes, name, then = case
        calls[case] = partial(disagree, name, then, 2, MPIDDP_NODES=nodes)
    with side_by_side(calls, places=3) as futures:
        yield futures


def assert_ended(done, *texts):
    assert done.rc == 111 and done.seconds < 30 and "went on" not in done.stdout, done
    assert all(text in done.stderr for text in texts), done


@pytest.mark.parametrize("name", CASES)
def test_job_ends(jobs, name):
    assert_ended(jobs[name].result(), "disagree: rank", *CASES[name][1:])


def test_a_rank_that_waits_ends_the_job_where_the_other_goes_on(jobs):
    assert_ended(jobs["caught"].result(), "Waiting (most recent call last)", "rank 2 calls barrier #1")


@pytest.mark.parametrize("case", thinned(BETWEEN_NODES, ("0,0,1", "dtype", "barrier"), STAYED), ids=", ".join)
def test_between_nodes_it_is_found_later(jobs, case):
    assert_ended(jobs[case].result(), BETWEEN_NODES[case])


@pytest.mark.core
@pytest.mark.parametrize("last", LAST)
def test_the_end_of_a_job_compares_its_last_calls(last):
    env, texts = LAST[last]
    for _ in range(3):
        done = job("disagree", last, ranks=3, **env)
        assert done.seconds < 30 and all(text in done.stderr for text in ["disagree: rank", *texts]), done
        # mpirun itself may crash then, in libpmix: seen after 6 of 97 such ends with Open MPI 5.0.11.
        if not (is_open_mpi() and done.rc == -signal.SIGSEGV):
            break
    assert done.rc == 111, done


@pytest.mark.long
@pytest.mark.parametrize("seed", range(19))
def test_both_sides_of_drawn_calls_are_named(seed):
    """Made-up nodes; ``python -m tests.measure.disagreeing`` runs as many as one likes."""
    assert disagreeing.run(seed) == ""


@pytest.mark.long
def test_both_sides_of_drawn_calls_are_named_on_hosts():
    if (why := hosts.why_not()) is not None:
        pytest.skip(why)
    with hosts.Hosts(2) as on:
        assert [disagreeing.run(seed, on) for seed in range(20, 24)] == [""] * 4


def test_a_mismatch_tells_the_lines_of_both(jobs):
    line = line_of("disagree", "dist.barrier() if odd else dist.all_reduce(x)")
    done = jobs["operation"].result()
    assert f"line {line}" in done.stderr and re.search(rf"    rank \d \(node .*  disagree.py:{line}", done.stderr), done
