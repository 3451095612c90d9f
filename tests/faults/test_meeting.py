"""The first meeting of ranks: who is missing, and what is left of a meeting that was given up."""

import time

import pytest

from mpiddp.errors import DistTimeoutError
from mpiddp.faults.meeting import Meeting
from mpiddp.mpi import lazy


@pytest.mark.mpi
@pytest.mark.core
@pytest.mark.ranks(3)
def test_a_late_rank_is_named_and_meets_those_that_begin_again(world, capfd, monkeypatch):
    monkeypatch.setenv("MPIDDP_WARN_AFTER", "0.2")
    part = lazy.MPI.COMM_WORLD.Split(0, -world.rank)
    lazy.MPI.COMM_WORLD.Barrier()
    if part.rank == 0:
        time.sleep(1.4 if part.size > 1 else 0)
    else:
        meeting, late = Meeting(part, 0.4), rf"rank 0 \({world.size - 1} of the world, pid \d+\) has not called it"
        with pytest.raises(DistTimeoutError, match=late), meeting.held():
            meeting.duplicate()
        assert (" s in init_process_group:\n  rank 0 (" in capfd.readouterr().err) == (part.rank == 1)
    meeting = Meeting(part, 30)
    with meeting.held():
        made = meeting.duplicate()
        told = meeting.allgather(made, "x" * part.rank)
    assert [len(each) for each in told] == list(range(part.size))
    assert lazy.MPI.Comm.Compare(made, part) == lazy.MPI.CONGRUENT
    made.Free()
    part.Free()


@pytest.mark.mpi
def test_a_meeting_that_was_given_up_goes_on_and_keeps_no_other_communicator_from_being_made(world):
    part, other = (lazy.MPI.COMM_WORLD.Split(0, world.rank) for _ in range(2))

    def give_up():
        meeting = Meeting(part, 0.2)
        with pytest.raises(DistTimeoutError), meeting.held():
            meeting.allgather(meeting.duplicate(), world.rank)

    if world.size > 1 and world.rank > 0:
        give_up()
    made, request = other.Idup()  # of a later number: Open MPI makes communicators in the order of their parents'
    end = time.monotonic() + 20
    while not request.Test():
        assert time.monotonic() < end, "another communicator waits for the meeting"
        time.sleep(0.001)
    if world.size > 1 and world.rank == 0:
        give_up()  # where it meets what the others have begun
    lazy.MPI.COMM_WORLD.Barrier()
    meeting = Meeting(part, 30)
    with meeting.held():
        met = meeting.duplicate()
        assert meeting.allgather(met, world.rank) == [*range(world.size)]
    for comm in (met, made, part, other):
        comm.Free()
