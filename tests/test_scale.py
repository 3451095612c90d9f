"""Nothing that a rank does by itself is quadratic in the ranks or nodes, in made-up worlds without MPI.

Lines that run are counted, which no other load changes, and comparisons of nodes, as of a loop inside of NumPy's or
Python's own functions. Twice the ranks take twice as many; four times as many would be quadratic.
"""

import gc
import sys

import made_up
import numpy as np
import pytest
from made_up import work

from mpiddp.distributed import new_groups
from mpiddp.faults import monitor

SMALL = 256
LINEAR = 2.5
"""Most that twice the ranks may cost; costs without ranks make it less than 2."""


def lines(call) -> int:
    """Return the number of lines that a call runs, each turn of a loop in a line counted."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += event in ("call", "line")
        return trace

    before = sys.gettrace()
    gc.disable()  # what other tests have left would run finalizers here
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def at_both_sizes(count, around=lambda size: made_up.mpi(size, size - 1)) -> list:
    """Return what is counted in a world of some ranks, and in one of twice as many."""
    found = []
    for size in (SMALL, 2 * SMALL):
        with around(size) as group:
            found.append(count(size if group is None else group))
    return found


def growth(make) -> float:
    """Return the factor by which twice the ranks multiply the lines that a call of ``make``'s result."""
    small, large = at_both_sizes(lambda size: lines(make(size)))
    return large / small


@pytest.mark.parametrize("per_node", [1, 8])
@pytest.mark.parametrize("make", [work.starting, work.connecting])
def test_start_and_groups(make, per_node):
    assert growth(lambda n: make(n, per_node)) < LINEAR


@pytest.mark.parametrize("per_node", [1, 8])
def test_a_call_over_several_nodes_costs_no_python_for_each_rank(per_node):
    def warm(size):
        call = work.meeting(work.connect(size, per_node))
        call()  # fills caches
        return call

    assert growth(warm) == pytest.approx(1, abs=0.05)


def test_questions_and_blocks():
    assert growth(work.asking) < LINEAR
    assert growth(lambda n: work.gathering(n)[1]) < LINEAR


@pytest.mark.parametrize(
    "call",
    [
        lambda group: new_groups.new_group(),
        lambda group: new_groups.new_subgroups(8),
        lambda group: new_groups.new_subgroups_by_enumeration([[rank] for rank in range(group.size())]),
        work.monitored_barrier,
    ],
)
def test_calls_of_the_api(call):
    small, large = at_both_sizes(lambda group: lines(lambda: call(group)), lambda n: made_up.default_group(n, 8))
    assert large / small < LINEAR


class Node(int):
    """The number of a node, whose comparisons are counted."""

    compared = 0

    def __eq__(self, other):
        Node.compared += 1
        return int(self) == int(other)

    def __hash__(self):
        return int(self)


def test_nodes_are_not_compared_with_each_other():
    with made_up.mpi(SMALL, SMALL - 1):
        job = made_up.job(SMALL, 1)
        object.__setattr__(job.world, "nodes", tuple(map(Node, job.world.nodes)))
        monitor.connect(job, made_up.Comm(SMALL, SMALL - 1, 1), made_up.TIMEOUT_S)
    assert Node.compared <= 3 * SMALL


def test_one_probe_receives_a_block_of_any_rank():
    with made_up.mpi(SMALL):
        comm, test = work.gathering(SMALL)
        assert test()
    assert comm.probes == SMALL - 1


def test_a_poll_looks_only_at_the_ranks_that_are_ahead():
    def poll(size):
        comm, test = work.gathering(size, ahead=1)
        comm.arriving = comm.arriving[-2:]
        assert not test()
        return test

    assert growth(poll) == pytest.approx(1, abs=0.05)


def test_calls_keep_nothing():
    with made_up.mpi(SMALL, SMALL - 8):
        meet = work.meeting(work.connect(SMALL, 8))
        meet()
        assert work.kept(lambda: [meet() for _ in range(64)] and None) < SMALL * 64


def test_collectives_of_mpi_make_a_group():
    small, large = at_both_sizes(
        lambda group: work.collectives(new_groups.new_group), lambda n: made_up.default_group(n, 1)
    )
    assert 0 < len(small) == len(large) < 12 and {*large} == {1, 2 * SMALL}


def test_messages_between_many_nodes_are_not_short():
    with made_up.mpi(64):
        sizes = work.crossing(64, 8)
    assert np.median(sizes) >= 1 << 14


def test_a_group_of_a_large_node_is_small_until_it_moves_something_large():
    own, shared, scratch = work.memory_of_a_group(128, 128)
    assert own + shared < work.MIB // 4
    assert own + shared + scratch < work.MIB


def test_a_rank_populates_its_own_region_only():
    _, small, _ = work.memory_of_a_group(4 * 16, 16)
    _, large, _ = work.memory_of_a_group(4 * 128, 128)
    assert large == small
