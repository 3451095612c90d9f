"""Tests that start launchers, several files at a time, each in a fork of pytest, for they mostly wait.

Reports come back through a pipe, in the order of the tests; no state of a fork reaches another file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from _pytest.runner import SetupState, runtestprotocol

from harness import launcher

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

LONGEST = (
    *("test_with_torch", "test_unchanged", "test_slurm_jobs", "test_elastic_jobs", "test_harness_jobs"),
    *("test_leaving_jobs", "test_calls_jobs", "test_reports_jobs"),
)
"""Begun first, so that none runs alone in the end."""
LEAVE_S = 5.0
"""For a child to end its jobs when pytest is interrupted."""


def place(path: Path) -> int:
    return LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST)


class Child:
    def __init__(self, items: list[pytest.Item]) -> None:
        # Both would write a buffer's content.
        sys.stdout.flush()
        sys.stderr.flush()
        self.owed = [item.nodeid for item in items]
        """Tests whose reports have not come."""
        self.pipe, theirs = connection.Pipe(duplex=False)
        self._job = launcher.new_job()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            os.environ[launcher.JOB] = self._job
            signal.signal(signal.SIGTERM, _leave)
            # Ctrl-C reaches every process of the terminal; the parent tells its children. A handler, and no SIG_IGN,
            # which the jobs would inherit.
            signal.signal(signal.SIGINT, lambda number, frame: None)
            _run(items, theirs)
        theirs.close()

    def reports(self) -> dict[str, list[dict[str, Any]] | str]:
        """Return the next test's reports, by its name, or how the child has ended for each test that it owes."""
        try:
            nodeid, data = self.pipe.recv()
        except (EOFError, OSError):  # OSError: in the middle
            return dict.fromkeys(self.owed, self._wait())
        self.owed.remove(nodeid)
        return {nodeid: data}

    def _wait(self) -> str:
        self.pipe.close()
        _, status = os.waitpid(self.pid, 0)
        return f"exit code {os.waitstatus_to_exitcode(status)}"

    def end(self) -> None:
        """End the child and its processes: first so that it ends its jobs, then for good."""
        os.kill(self.pid, signal.SIGTERM)
        limit = time.monotonic() + LEAVE_S
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > limit:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.05)
        launcher.kill_members(self._job)
        self.pipe.close()


def _leave(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    raise KeyboardInterrupt


def _run(items: list[pytest.Item], pipe: connection.Connection) -> None:
    code = 1
    try:
        config, session = items[0].config, items[0].session
        # The parent may be between two tests of another folder, whose collectors it has set up and will tear down.
        session._setupstate = SetupState()
        capture = config.pluginmanager.get_plugin("capturemanager")
        # Files of its own for the tests' output.
        capture.stop_global_capturing()
        capture.start_global_capturing()
        for item, following in zip(items, [*items[1:], None], strict=True):
            reports = runtestprotocol(item, log=False, nextitem=following)
            data = [config.hook.pytest_report_to_serializable(config=config, report=report) for report in reports]
            pipe.send((item.nodeid, data))
        code = 0
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
    finally:
        os._exit(code)


class Workers:
    def __init__(self, items: list[pytest.Item], places: int) -> None:
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        self._waiting = list(files.values())
        self._places = places
        self._running: list[Child] = []
        self._reports: dict[str, list[dict[str, Any]] | str] = {}

    def run(self, nodeid: str) -> list[dict[str, Any]] | str:
        """Return a test's reports as soon as they are there, or how the process ended that owed them."""
        while nodeid not in self._reports:
            while self._waiting and len(self._running) < self._places:
                self._running.append(Child(self._waiting.pop(0)))
            ready = connection.wait([child.pipe for child in self._running])
            for child in [child for child in self._running if child.pipe in ready]:
                self._reports.update(child.reports())
                if child.pipe.closed:
                    self._running.remove(child)
        return self._reports.pop(nodeid)

    def close(self) -> None:
        """Begin no more files, and end those that run."""
        self._waiting.clear()
        for child in self._running:
            child.end()
        self._running.clear()
