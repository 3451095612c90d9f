"""pytest's summary: a line for each kind of test (``unit``, number of ranks, ``launch``)."""

import time
from collections import Counter, defaultdict

import pytest


def part_of(item: pytest.Item) -> str:
    ranks = getattr(item, "ranks", 0)
    if ranks:
        return f"{ranks} rank{'s' * (ranks != 1)}"
    return "launch" if item.get_closest_marker("launch") else "unit"


class Summary:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._parts: dict[str, str] = {}
        self._part = ""
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: dict[str, float] = defaultdict(float)
        self._clock = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._parts = {item.nodeid: part_of(item) for item in session.items}
        self._clock = time.monotonic()

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
        part, now = self._parts[report.nodeid], time.monotonic()
        self._seconds[part] += now - self._clock
        self._clock = now
        outcome = self._config.hook.pytest_report_teststatus(report=report, config=self._config)[0]
        if outcome:
            self._outcomes[part][outcome] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._all_skipped():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("parts")
        for part, outcomes in self._outcomes.items():
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            terminalreporter.write_line(f"{part}: {counts} in {self._seconds[part]:.0f} s")
        if self._all_skipped():
            terminalreporter.write_line("ERROR: all MPI tests were skipped", red=True)

    def _all_skipped(self) -> bool:
        parts = [outcomes for part, outcomes in self._outcomes.items() if part[0].isdigit()]
        return bool(parts) and all(set(outcomes) <= {"skipped"} for outcomes in parts)
