"""The processes that a launcher has started: here this one, with children that are ranks or not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from mpiddp.mpi import processes

TITLED = """
import ctypes, pathlib
fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])
ctypes.memset(start, 0, end - start)
"""
WAITS = "print('up', flush=True)\nimport time\ntime.sleep(60)\n"


def test_ranks_are_told_from_daemons_even_if_a_title_covers_their_environment():
    children = {
        3: (WAITS, {"PMI_RANK": "3"}),
        4: (WAITS, {"OMPI_COMM_WORLD_RANK": "4"}),
        None: (WAITS, {"PATH": "/bin"}),
        processes._UNKNOWN: (TITLED + WAITS, {"PMI_RANK": "5"}),
    }
    started = {}
    try:
        for rank, (code, env) in children.items():
            started[rank] = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
        for each in started.values():
            assert each.stdout.readline() == b"up\n"
        found = processes.started_ranks(os.getpid())
        assert {rank: found.get(str(each.pid)) for rank, each in started.items()} == {rank: rank for rank in started}
    finally:
        for each in started.values():
            each.kill()
            each.wait()
            each.stdout.close()
    assert not processes.started_ranks(os.getpid())


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
        monkeypatch.setattr(processes, name, 0.0)
    monkeypatch.setattr(os, "_exit", lambda code: (exits.append(code), over.set()))
    processes._watch(9, over)
    assert exits == [1] * ended
