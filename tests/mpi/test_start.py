"""Ranks that have ended before MPI starts, told from those that are still to be started."""

import os
import threading

import pytest

from mpiddp.mpi import processes, start


@pytest.mark.parametrize("ended", [False, True])
def test_ranks_that_are_still_to_be_started_have_not_ended(monkeypatch, ended):
    looks, exits, over = [], [], threading.Event()

    def started(starter):
        looks.append(starter)
        if len(looks) == 8:
            over.set()
        return {str(pid): pid for pid in range(1, 3 if ended else len(looks))}

    monkeypatch.setattr(processes, "started_ranks", started)
    for name in ("_LOOK_S", "_LOOK_RANK_S", "_MISSING_S", "_END_S"):
        monkeypatch.setattr(start, name, 0.0)
    monkeypatch.setattr(os, "_exit", lambda code: (exits.append(code), over.set()))
    start._watch(9, over)
    assert exits == [1] * ended
