"""The processes that a launcher has started: here this one, with children that are ranks or not."""

import os
import subprocess
import sys

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
        processes.UNKNOWN: (TITLED + WAITS, {"PMI_RANK": "5"}),
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
