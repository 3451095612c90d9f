"""A launcher that stays when its ranks are gone; jobs with ranks are in tests/launch."""

from __future__ import annotations

import sys
import time

import pytest

from mpiddp.training import supervisor

# A rank 0 that lives for a moment, or stays, and a launcher that waits for ever.
LAUNCHER = """
import os, pathlib, subprocess, sys, time
rank_0 = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({seconds})"])
marker = pathlib.Path(os.environ["MPIDDP_MARKER"])
marker.write_text(f"watched {host} {{rank_0.pid}}")
rank_0.wait()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("host", "seconds", "ended"), [("here", 0, True), ("elsewhere", 0, False), ("here", 60, False)]
)
def test_launcher_whose_rank_0_is_gone_is_ended(monkeypatch, tmp_path, host, seconds, ended):
    monkeypatch.setattr(supervisor, "_GONE_S", 1.0)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    program = LAUNCHER.format(host=host, seconds=seconds)
    command = supervisor.Command([sys.executable, "-c", program])
    lost_after_s = 4.0
    one = supervisor.Supervisor(command, None, tmp_path / "marker", lost_after_s, supervisor._Forwarding())
    began = time.monotonic()
    end = one._job(command.words)
    assert end.lost and not end.well
    assert (time.monotonic() - began < lost_after_s) == ended
