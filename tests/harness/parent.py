"""The pytest plugin of the plain process: every test of tests/mpi becomes one item for each number of ranks.

pytest under mpiexec (`harness.ranks`) collects and runs them, one job for each number; reports appear here as if the
tests had run here. This process imports neither MPI nor tests/mpi.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr

from harness import launcher, tiers, workers
from harness.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest._io import TerminalWriter

LIMIT_S = float(os.environ.get("MPIDDP_TEST_LIMIT", "60"))
"""For a test on the ranks, which then end themselves with stacks."""
PATIENCE_S = max(LIMIT_S, 60.0) + 30
"""Longest silence of the ranks."""
RESTARTS = 3
"""After a test that has ended a job, for the remaining tests."""


class Job:
    """One pytest under mpiexec, and the events that its rank 0 writes."""

    def __init__(self, config: pytest.Config, ranks: int, files: list[str], run: list[str] | None) -> None:
        mpiexec = launcher.mpiexec()
        assert mpiexec is not None, "checked when the files were collected"
        self._folder = Path(tempfile.mkdtemp(prefix="mpiddp-job-"))
        events = self._folder / "events"
        events.touch()
        self._events = events.open("rb")
        self._half_line = b""
        plan: dict[str, Any] = {"ranks": ranks, "events": str(events), "folder": str(self._folder)}
        if run is not None:
            plan["run"] = run
        (self._folder / "plan").write_text(json.dumps(plan))
        option = config.option
        arguments = [f"--rootdir={config.rootpath}", "-p", "no:cacheprovider", f"--tb={option.tbstyle}"]
        arguments += ["-c", str(config.inipath)] if config.inipath else []
        arguments += ["-v"] * max(option.verbose, 0) + ["-l"] * option.showlocals
        arguments += [part for warning in option.pythonwarnings or () for part in ("-W", warning)]
        arguments += [part for setting in option.override_ini or () for part in ("-o", setting)]
        arguments += ["-s"] if option.capture == "no" else []
        arguments += ["--collect-only", "-q"] if run is None else []
        arguments += ["--long"] * option.long
        interpreter = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
        self.program = launcher.Program(
            [mpiexec, "-n", str(ranks), *interpreter, "-m", "pytest", *arguments, *files],
            {launcher.PLAN: str(self._folder / "plan")},
            cwd=config.rootpath,
            echo=option.capture == "no" and run is not None,
            scratch=self._folder,
        )

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events until the job has ended or was silent for too long."""
        heard = time.monotonic()
        while True:
            ended = self.program.poll() is not None
            chunk = self._events.read()
            *lines, self._half_line = (self._half_line + chunk).split(b"\n")
            for line in lines:
                yield json.loads(line)
            if chunk:
                heard = time.monotonic()
            elif ended or time.monotonic() - heard > PATIENCE_S:
                return
            else:
                time.sleep(0.01)

    def last_words(self) -> str:
        rc = self.program.poll()
        how = f"exit code {rc}" if rc is not None else f"silent for {PATIENCE_S:.0f} s, killed"
        lines = "\n".join(self.program.output).strip().splitlines()
        return f"{how}\n" + "\n".join(lines[-150:])

    def close(self) -> None:
        self.program.close()
        self._events.close()


class Runner:
    """The items of one number of ranks, and the jobs that run them."""

    def __init__(self, config: pytest.Config, ranks: int, items: list[MpiItem]) -> None:
        self._config = config
        self.ranks = ranks
        self._pending = {item.origin: item for item in items}
        self._job: Job | None = None
        self._events: Iterator[dict[str, Any]] = iter(())
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._running: str | None = None
        self._jobs = 0
        self._job_failed = False
        self._hopeless = ""

    def run(self, item: MpiItem) -> list[pytest.TestReport]:
        reports = self._wait_for(item)
        self._job_failed |= any(report.failed for report in reports)
        del self._pending[item.origin]
        if not self._pending and self._job is not None:
            reports += self._end(item)
        for report in reports:
            report.nodeid = item.nodeid
            path, line, domain = report.location
            report.location = path, line, domain.replace(item.origin_name, item.name, 1)
        return reports

    def start(self) -> None:
        if self._job is None and self._pending:
            files = list(dict.fromkeys(origin.partition("::")[0] for origin in self._pending))
            self._job = Job(self._config, self.ranks, files, list(self._pending))
            self._events = self._job.events()
            self._jobs += 1
            self._running, self._job_failed = None, False

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

    def _wait_for(self, item: MpiItem) -> list[pytest.TestReport]:
        """Return the ranks' reports of ``item``, or the reason for their absence."""
        if self._hopeless:
            return [_failure(item, self._hopeless)]
        self.start()
        for event in self._events:
            match event:
                case {"started": origin}:
                    self._running = origin
                case {"report": data}:
                    report = _from_data(self._config, data)
                    self._reports.setdefault(report.nodeid, []).append(report)
                case {"finished": origin}:
                    self._running = None
                    if origin == item.origin:
                        return self._reports.pop(origin)
                case {"renew": _}:
                    self.close()
                    self._count_restarts()
                    return self._wait_for(item)
                case {"stuck": _, "text": text} | {"fatal": text}:
                    return self._lost(item, text)
        return self._lost(item, f"mpiexec -n {self.ranks} did not finish this test: {self._job.last_words()}")

    def _lost(self, item: MpiItem, text: str) -> list[pytest.TestReport]:
        """End the job; a new one takes the other tests, if this test ended it."""
        if self._running != item.origin:
            self._hopeless = f"not run, because the job of {self.ranks} ranks ended outside of a test"
        self._count_restarts()
        self.close()
        return [_failure(item, text)]

    def _count_restarts(self) -> None:
        if self._jobs > RESTARTS and not self._hopeless:
            self._hopeless = f"not run, because {self._jobs} jobs of {self.ranks} ranks were ended by a test"

    def _end(self, item: MpiItem) -> list[pytest.TestReport]:
        """Wait for the ranks to leave, as part of the last test."""
        assert self._job is not None
        limit = time.monotonic() + PATIENCE_S
        while (rc := self._job.program.poll()) is None and time.monotonic() < limit:
            time.sleep(0.01)
        words = self._job.last_words()
        self.close()
        if rc is not None and (rc != 0) == self._job_failed:
            return []
        return [_failure(item, f"mpiexec -n {self.ranks} after its last test: {words}", "teardown")]


def _from_data(config: pytest.Config, data: dict[str, Any]) -> Any:
    if isinstance(data["longrepr"], list):
        # A skipped test's place and reason; JSON knows no tuple.
        data["longrepr"] = tuple(data["longrepr"])
    return config.hook.pytest_report_from_serializable(config=config, data=data)


class _Text(TerminalRepr):
    """A failure as text; of a plain str pytest would repeat all in its summary."""

    def __init__(self, item: MpiItem, text: str) -> None:
        self._text = text
        path, line, _ = item.origin_location
        self.reprcrash = ReprFileLocation(path, (line or 0) + 1, text.partition("\n")[0])

    def toterminal(self, tw: TerminalWriter) -> None:
        tw.line(self._text)


def _failure(item: MpiItem, text: str, when: Literal["call", "teardown"] = "call") -> pytest.TestReport:
    return pytest.TestReport(item.origin, item.origin_location, {}, "failed", _Text(item, text), when)


class MpiItem(pytest.Item):
    def __init__(self, *, ranks: int, test: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ranks = ranks
        self.origin: str = test["nodeid"]
        self.origin_name = _last_part(self.origin)
        path, line, domain = test["location"]
        self.origin_location: tuple[str, int | None, str] = (path, line, domain)
        for mark in test["marks"]:
            self.add_marker(mark)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        _, line, domain = self.origin_location
        return self.path, line, domain.replace(self.origin_name, self.name, 1)

    def runtest(self) -> None:
        raise NotImplementedError


def _last_part(nodeid: str) -> str:
    """Return the part after the last ``::`` outside of parameters."""
    head, bracket, parameters = nodeid.partition("[")
    return head.rpartition("::")[2] + bracket + parameters


class MpiNode(pytest.Collector):
    def __init__(self, *, children: list[tuple[tuple[str, ...], dict[str, Any]]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.children = children

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return _nodes(self, self.children)


class MpiFile(pytest.File):
    """A file of tests/mpi; collected by asking one rank."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        """Return an item for each test and number of ranks; the tests of one number stay together."""
        found = self.config.stash[_KEY].collected()
        nodeid = self.path.relative_to(self.config.rootpath).as_posix()
        if nodeid in found.reports:
            report = found.reports[nodeid]
            if report.skipped:
                raise pytest.skip.Exception(report.longreprtext, allow_module_level=True)
            raise self.CollectError(report.longreprtext)
        if found.failure:
            raise self.CollectError(found.failure)
        tests = []
        for test in found.tests:
            if test["nodeid"].partition("::")[0] == nodeid:
                head, bracket, parameters = test["nodeid"].partition("[")
                _, *classes, name = head.split("::")
                tests.append(((*classes, name + bracket + parameters), test))
        return _nodes(self, tests)


def _nodes(
    parent: pytest.Collector, tests: list[tuple[tuple[str, ...], dict[str, Any]]]
) -> list[pytest.Item | pytest.Collector]:
    """Return the nodes below ``parent``; ``tests`` pairs the names from there on with the test."""
    nodes: list[pytest.Item | pytest.Collector] = []
    classes: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {}
    for (name, *rest), test in tests:
        if rest:
            classes.setdefault(name, []).append((tuple(rest), test))
            continue
        nodes += [
            MpiItem.from_parent(parent, name=f"{name}[np={ranks}]", ranks=ranks, test=test)
            for ranks in parent.config.stash[_KEY].numbers(test)
        ]
    nodes += [MpiNode.from_parent(parent, name=name, children=below) for name, below in classes.items()]
    return nodes


@dataclass
class Collected:
    """One rank's findings in tests/mpi: tests, reports of files that did not pass, or a failure."""

    tests: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[str, pytest.CollectReport] = field(default_factory=dict)
    failure: str = ""


class Parent:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = config.rootpath / "tests" / "mpi"
        self._collected: Collected | None = None
        self._runners: dict[int, Runner] = {}
        self._workers: workers.Workers | None = None
        self._began = time.time()
        given = config.getoption("ranks")
        try:
            self._given = sorted({int(number) for number in given.split(",")}) if given else []
            if given and self._given[0] < 1:
                raise ValueError
        except ValueError:
            raise pytest.UsageError(f"--ranks takes numbers of ranks, like 2,3; got {given!r}") from None

    def numbers(self, test: dict[str, Any]) -> list[int]:
        if self._given:
            return self._given
        return tiers.numbers(Path(test["location"][0]).name, test["marks"], self._config.option.long)

    def collected(self) -> Collected:
        if self._collected is None:
            self._collected = found = Collected()
            if launcher.mpiexec() is None:
                found.failure = launcher.NO_MPIEXEC
                return found
            job = Job(self._config, 1, self._asked(), None)
            for event in job.events():
                match event:
                    case {"collect": data}:
                        report = _from_data(self._config, data)
                        found.reports[report.nodeid] = report
                    case {"collected": tests}:
                        found.tests = tests
                    case {"stuck": _, "text": text}:
                        found.failure = text
            if not found.failure and not found.tests and not found.reports:
                found.failure = f"mpiexec -n 1 python -m pytest --collect-only tests/mpi: {job.last_words()}"
            job.close()
        return self._collected

    def _asked(self) -> list[str]:
        """Return the files of tests/mpi that were named, or the folder."""
        here = self._config.invocation_params.dir
        paths = [(here / argument.partition("::")[0]).resolve() for argument in self._config.args]
        files = [str(path) for path in paths if self._folder in path.parents]
        whole = not files or any(path == self._folder or path in self._folder.parents for path in paths)
        return [str(self._folder)] if whole else list(dict.fromkeys(files))

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> MpiFile | None:
        if self._folder in module_path.parents:
            return MpiFile.from_parent(parent, path=module_path)
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # Stable; those that start launchers take the longest, and come last.
        items.sort(
            key=lambda item: (
                (item.ranks, 0)
                if isinstance(item, MpiItem)
                else (0, 0)
                if _is_plain(item)
                else (math.inf, workers.place(item.path))
            )
        )

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not isinstance(item, MpiItem):
            if _is_plain(item) and self._config.option.capture != "no":
                # A rank needs one core, and this process another.
                self._runner(1, item.session).start()
            return self._aside(item)
        runner = self._runner(item.ranks, item.session)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in runner.run(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _aside(self, item: pytest.Item) -> bool | None:
        """Hand out a fork's reports of a test that starts launchers; None if it is to run here."""
        if not _starts_launchers(item) or self._config.option.capture == "no" or self._config.option.usepdb:
            return None
        if self._workers is None:
            self.pytest_sessionfinish()
            items = [each for each in item.session.items if _starts_launchers(each)]
            if len({each.path for each in items}) == 1:
                return None
            self._workers = workers.Workers(items, self._config.getoption("at_once"))
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        found = self._workers.run(item.nodeid)
        if isinstance(found, str):
            text = f"the process of {item.path.name} ended before it told of this test: {found}"
            reports = [pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")]
        else:
            reports = [_from_data(self._config, data) for data in found]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        for runner in self._runners.values():
            runner.close()
        if self._workers is not None:
            self._workers.close()

    def pytest_unconfigure(self) -> None:
        if launcher.remove_segments(self._began):
            time.sleep(launcher.YOUNG_S)
            launcher.remove_segments(self._began)

    def _runner(self, ranks: int, session: pytest.Session) -> Runner:
        """Return the runner of a number of ranks; that of another number ends."""
        if ranks not in self._runners:
            self.pytest_sessionfinish()
            items = [item for item in session.items if isinstance(item, MpiItem) and item.ranks == ranks]
            self._runners[ranks] = Runner(self._config, ranks, items)
        return self._runners[ranks]


def _is_plain(item: pytest.Item) -> bool:
    return "tests/unit" in item.nodeid


def _starts_launchers(item: pytest.Item) -> bool:
    return item.path.parent.name in ("launch", "with_torch")


_KEY: pytest.StashKey[Parent] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks", metavar="N,...", help="numbers of ranks for tests/mpi (default: 2,3; what touches MPI 1,2,3,4)"
    )
    parser.addoption(
        "--at-once", metavar="N", type=int, default=3, help="files of tests/launch and tests/with_torch side by side"
    )


def pytest_configure(config: pytest.Config) -> None:
    parent = config.stash[_KEY] = Parent(config)
    config.pluginmanager.register(parent, "mpi-parent")
    config.pluginmanager.register(Summary(config), "parts")
    # As Ctrl-C: pytest ends in order, and no launcher is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
