"""Restarts, signals and the marker, without ranks; jobs with ranks are in test_supervisor_jobs."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mpiddp import cli, settings
from mpiddp.faults import marker
from mpiddp.training import supervisor


def supervisor_of(tmp_path, words, lost_after_s=300.0):
    return supervisor.Supervisor(supervisor.Command(words), None, tmp_path / "marker", lost_after_s)


# The first start runs; the host is away at the next three, and the last one ends well.
AWAY = """
import os, pathlib, sys
marker, count = pathlib.Path(os.environ["MPIDDP_MARKER"]), pathlib.Path("count")
number = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (number + 1))
if number in (0, 4):
    marker.write_text("running" if number == 0 else "ended")
sys.exit(number != 4)
"""


@pytest.mark.parametrize("long_s", [60.0, 0.0])
def test_host_that_is_away_gets_growing_pauses(monkeypatch, tmp_path, capfd, long_s):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "_PAUSES_S", (0.1, 0.2, 0.3))
    monkeypatch.setattr(supervisor, "_LONG_S", long_s)
    assert supervisor_of(tmp_path, [sys.executable, "-c", AWAY]).run(9) == 0
    pauses = re.findall(r"started again in (\S+) s", capfd.readouterr().err)
    assert pauses == (["0.1", "0.2", "0.3", "0.3"] if long_s else ["0.1"] * 4)


def test_signal_in_a_pause_ends_the_attempts(monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "_PAUSES_S", (60.0,))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert supervisor_of(tmp_path, ["false"]).run(9) == 1


@pytest.mark.parametrize("ends", [True, False])
def test_marker_that_is_deleted_ends_no_supervisor(tmp_path, ends):
    program = "import os, pathlib, time; marker = pathlib.Path(os.environ['MPIDDP_MARKER']); marker.unlink();"
    program += f"time.sleep(0.6); {ends} and marker.write_text('{marker.ENDED}')"
    words = [sys.executable, "-c", program]
    end = supervisor_of(tmp_path, words, 0.2)._job(words)
    assert (end.code, end.lost, end.well) == (0, False, ends)


def test_programs_of_ranks_end_with_their_job(monkeypatch, tmp_path):
    monkeypatch.setenv("MPIDDP_MARKER", str(tmp_path / "marker"))
    environments = [dict(os.environ), settings.outside_of_jobs()]
    assert "MPIDDP_MARKER" not in environments[1], "it is not theirs to write"
    programs = [subprocess.Popen(["sleep", "60"], env=each) for each in environments]
    try:
        # Popen may return before the kernel shows the new program's environment.
        while not all(Path(f"/proc/{each.pid}/environ").read_bytes() for each in programs):
            time.sleep(0.01)
        supervisor_of(tmp_path, ["true"])._kill_members()
        assert [each.wait(10) for each in programs] == [-signal.SIGKILL] * 2
    finally:
        for each in programs:
            each.kill()


def test_a_working_directory_that_is_gone_is_a_usage_error(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with (
        pytest.raises(supervisor.UsageError, match="the working directory cannot be written"),
        supervisor._marker_file(),
    ):
        pass
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--restarts", "-1", "--", "true"], "--restarts has to be at least 0, got -1"),
        (["--lost-after", "0", "--", "true"], "--lost-after has to be positive"),
        (["--", "srun", "--output=log", "python", "-m", "mpiddp", "train"], "train needs --output DIR"),
        (["--", "no-such-launcher"], "no-such-launcher cannot be started"),
        (["--", "true"], "no rank of it has written the marker"),
    ],
)
def test_command_that_cannot_be_supervised_is_refused(monkeypatch, tmp_path, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *words]) in (1, 2)
    stderr = capsys.readouterr().err
    assert said in stderr and stderr.count("start ") <= 1
