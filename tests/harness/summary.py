"""pytest's summary: a line for each kind of test (``unit``, number of ranks, ``launch``) and each reason of skips."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict

import pytest

_ON_RANKS = re.compile(r"\[np=(\d+)\]$")
MPI = re.compile(r"\d+ ranks?$")


def part_of(item: pytest.Item) -> str:
    found = _ON_RANKS.search(item.name)
    if found:
        return f"{found[1]} rank{'s' * (found[1] != '1')}"
    return "launch" if item.get_closest_marker("launch") else "unit"


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


class Summary:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._parts: dict[str, str] = {}
        self._part = ""
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: dict[str, float] = defaultdict(float)
        self._clock = self._began = self._told = 0.0
        self._done = 0
        self._skipped: dict[str, str] = {}
        self._passed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._parts = {item.nodeid: part_of(item) for item in session.items}
        self._clock = self._began = self._told = time.monotonic()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped[report.nodeid] = _reason(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        part = self._parts[nodeid]
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if part == self._part or reporter is None or reporter.verbosity < 0:
            return
        # dots without the names of files
        reporter.showfspath = reporter.verbosity > 0
        if self._part:
            reporter.write_line("")
        self._part = part
        reporter.write_line(f"{part}: {[*self._parts.values()].count(part)} tests")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        part, origin = self._parts[report.nodeid], _ON_RANKS.sub("", report.nodeid)
        now = time.monotonic()
        self._seconds[part] += now - self._clock
        self._clock = now
        outcome = self._config.hook.pytest_report_teststatus(report=report, config=self._config)[0]
        if outcome:
            self._outcomes[part][outcome] += 1
        if outcome == "passed":
            self._passed.add(origin)
        elif outcome == "skipped":
            self._skipped[report.nodeid] = _reason(report)

    def pytest_runtest_logfinish(self) -> None:
        """Say once a minute how far the suite is, for a log; on a terminal pytest shows it all the time."""
        self._done += 1
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or reporter.isatty or time.monotonic() - self._told < 60:
            return
        self._told = time.monotonic()
        minutes = (self._told - self._began) / 60
        reporter.write_line(f"\n{self._done} of {len(self._parts)} tests after {minutes:.0f} min")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._all_skipped():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("parts")
        for part, outcomes in self._outcomes.items():
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            terminalreporter.write_line(f"{part}: {counts} in {self._seconds[part]:.0f} s")
        for reason, count in self._reasons().most_common():
            terminalreporter.write_line(f"skipped {count}: {reason}")
        if self._all_skipped():
            terminalreporter.write_line("ERROR: all MPI tests were skipped", red=True)

    def _reasons(self) -> Counter[str]:
        """Count the reasons of skipped tests; one that ran on other ranks lacks nothing."""
        return Counter(
            "run on other numbers of ranks" if _ON_RANKS.sub("", nodeid) in self._passed else reason
            for nodeid, reason in self._skipped.items()
        )

    def _all_skipped(self) -> bool:
        parts = [outcomes for part, outcomes in self._outcomes.items() if MPI.match(part)]
        return bool(parts) and all(set(outcomes) <= {"skipped"} for outcomes in parts)
