"""The signals of Open MPI's mpirun: nobody swallows them."""

import signal
import subprocess
import sys

RANK = """
import os, signal, time
from types import SimpleNamespace
from mpiddp.faults import watchdog
from mpiddp.faults.job import Job

def fail():
    raise RuntimeError("MPI is broken")

watchdog.MPI = SimpleNamespace(Exception=RuntimeError)
world = SimpleNamespace(job=f"test-{os.getpid()}", rank=0)
failures = SimpleNamespace(caused=lambda _: True, revoke=lambda: None)
watched = watchdog.Watchdog(Job(world, SimpleNamespace(progress=fail), failures, None, None, None, False))
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
watched._thread.join(20)
assert not watched._thread.is_alive()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""


def test_a_watchdog_that_has_ended_swallows_no_sigterm() -> None:
    launcher = {"PATH": "/usr/bin", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    ended = subprocess.run([sys.executable, "-c", RANK], env=launcher, timeout=60, check=False)
    assert ended.returncode == -signal.SIGTERM
