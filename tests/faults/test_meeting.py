"""The first meeting of ranks: who is missing, and what is left of a meeting that was given up."""

from __future__ import annotations

import time

import pytest

from mpiddp.errors import DistTimeoutError
from mpiddp.faults.meeting import Meeting
from mpiddp.mpi import lazy


@pytest.mark.mpi
@pytest.mark.core
def test_a_late_rank_is_named_and_meets_those_that_begin_again(world, capfd, monkeypatch):
    monkeypatch.setenv("MPIDDP_WARN_AFTER", "0.3")
    part = lazy.MPI.COMM_WORLD.Split(0, -world.rank)
    lazy.MPI.COMM_WORLD.Barrier()
    if part.rank == 0:
        time.sleep(2 if part.size > 1 else 0)
    else:
        meeting, late = Meeting(part, 1), rf"rank 0 \({world.size - 1} of the world, pid \d+\) has not called it"
        with meeting.held(), pytest.raises(DistTimeoutError, match=late):
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
