"""Whatever end a job has, none of its shared memory stays behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import launcher

PROGRAM = """
import os, signal, sys
if "files" in sys.argv:
    del os.memfd_create
import numpy as np
import mpiddp as dist
dist.init_process_group()
x = dist.symmetric_empty(1 << 20)
x[...] = 1
dist.all_reduce(x)
assert (x == dist.get_world_size()).all()
dist.all_reduce(np.ones(1 << 18, np.float32))
dist.barrier()
if dist.get_rank() == dist.get_world_size() - 1:
    os.write(1, b"going\\n")
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


@pytest.mark.parametrize("way", ["memfd", "files"])
def test_a_killed_rank_leaves_no_shared_memory(tmp_path: Path, way: str) -> None:
    mpiexec = launcher.mpiexec()
    if mpiexec is None:
        pytest.skip(launcher.NO_MPIEXEC)
    script = tmp_path / "killed.py"
    script.write_text(PROGRAM)
    before = set(Path("/dev/shm").glob("mpiddp-*"))
    with launcher.Program([mpiexec, "-n", "3", sys.executable, str(script), way]) as program:
        done = program.wait(60)
    assert "going" in done.stdout and done.rc != 0, done
    assert set(Path("/dev/shm").glob("mpiddp-*")) <= before
