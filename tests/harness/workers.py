"""Tests that start launchers, several files at a time, each in a fork of pytest, for they mostly wait.

Reports come back through a pipe, in the order of the tests; no state of a fork reaches another file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from _pytest.runner import SetupState, runtestprotocol

from harness import launcher

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

LONGEST = (
    *("test_with_torch", "test_slurm_jobs", "test_elastic_jobs", "test_harness_jobs", "test_leaving_jobs"),
    *("test_calls_jobs", "test_reports_jobs"),
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
        self.pipe, theirs = os.pipe()
        self._job = launcher.new_job()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            os.environ[launcher.JOB] = self._job
            signal.signal(signal.SIGTERM, _leave)
            # Ctrl-C reaches every process of the terminal; the parent tells its children. A handler, and no SIG_IGN,
            # which the jobs would inherit.
            signal.signal(signal.SIGINT, lambda number, frame: None)
            _run(items, theirs)
        os.close(theirs)
        os.set_blocking(self.pipe, False)
        self._half_line = b""

    def reports(self) -> tuple[dict[str, list[dict[str, Any]]], bool]:
        """Return the reports that have come, by test, and True while the child goes on."""
        found, living = {}, True
        while True:
            try:
                chunk = os.read(self.pipe, 1 << 20)
            except BlockingIOError:
                break
            if not chunk:
                living = False
                break
            *lines, self._half_line = (self._half_line + chunk).split(b"\n")
            found.update(map(json.loads, lines))
        self.owed = [nodeid for nodeid in self.owed if nodeid not in found]
        return found, living

    def wait(self) -> str:
        os.close(self.pipe)
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
        os.close(self.pipe)


def _leave(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    raise KeyboardInterrupt


def _run(items: list[pytest.Item], pipe: int) -> None:
    code = 1
    try:
        config, session = items[0].config, items[0].session
        # The parent may be between two tests of another folder, whose collectors it has set up and will tear down.
        session._setupstate = SetupState()
        capture = config.pluginmanager.get_plugin("capturemanager")
        # Files of its own for the tests' output.
        capture.stop_global_capturing()
        capture.start_global_capturing()
        with os.fdopen(pipe, "wb") as file:
            for item, following in zip(items, [*items[1:], None], strict=True):
                reports = runtestprotocol(item, log=False, nextitem=following)
                data = [config.hook.pytest_report_to_serializable(config=config, report=report) for report in reports]
                file.write(json.dumps([item.nodeid, data], default=str).encode() + b"\n")
                file.flush()
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
            select.select([child.pipe for child in self._running], [], [])
            for child in list(self._running):
                found, living = child.reports()
                self._reports.update(found)
                if not living:
                    self._running.remove(child)
                    self._reports.update(dict.fromkeys(child.owed, child.wait()))
        return self._reports.pop(nodeid)

    def close(self) -> None:
        """Begin no more files, and end those that run."""
        self._waiting.clear()
        for child in self._running:
            child.end()
        self._running.clear()
