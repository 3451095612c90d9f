"""The pytest plugin of the plain process: every test marked as ``mpi`` becomes one item for each number of ranks.

pytest under mpiexec (`harness.ranks`) runs them, one job for each number; reports appear here as if the tests had run
here. This process imports the files of tests, and must not start MPI.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr

from harness import launcher, tiers, workers
from harness.summary import Summary
from mpiddp.cores import THREAD_VARIABLES

if TYPE_CHECKING:
    from _pytest._io import TerminalWriter

LIMIT_S = float(os.environ.get("MPIDDP_TEST_LIMIT", "60"))
"""For a test on the ranks, which then end themselves with stacks."""
PATIENCE_S = max(LIMIT_S, 60.0) + 30
"""Longest silence of the ranks."""
RESTARTS = 3
"""After a test that has ended a job, for the remaining tests."""


class Job:
    """One pytest under mpiexec, and the events that its rank 0 writes."""

    def __init__(self, config: pytest.Config, ranks: int, files: list[str], run: list[str]) -> None:
        mpiexec = launcher.mpiexec()
        assert mpiexec is not None, "checked when the tests were collected"
        self._folder = Path(tempfile.mkdtemp(prefix="mpiddp-job-"))
        events = self._folder / "events"
        events.touch()
        self._events = events.open("rb")
        self._half_line = b""
        plan = {"ranks": ranks, "events": str(events), "folder": str(self._folder), "run": run}
        (self._folder / "plan").write_text(json.dumps(plan))
        option = config.option
        arguments = [f"--rootdir={config.rootpath}", "-p", "no:cacheprovider", f"--tb={option.tbstyle}"]
        arguments += ["-c", str(config.inipath)] if config.inipath else []
        arguments += ["-v"] * max(option.verbose, 0) + ["-l"] * option.showlocals
        arguments += [part for warning in option.pythonwarnings or () for part in ("-W", warning)]
        arguments += [part for setting in option.override_ini or () for part in ("-o", setting)]
        arguments += ["-s"] if option.capture == "no" else []
        arguments += ["--long"] * option.long
        interpreter = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
        self.program = launcher.Program(
            [mpiexec, "-n", str(ranks), *interpreter, "-m", "pytest", *arguments, *files],
            {launcher.PLAN: str(self._folder / "plan")},
            cwd=config.rootpath,
            echo=option.capture == "no",
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
                    if self._running == origin:  # else another rank has begun the next one
                        self._running = None
                    if origin == item.origin:
                        return self._reports.pop(origin)
                case {"fatal": text}:
                    return self._lost(item, text)
        return self._lost(item, f"mpiexec -n {self.ranks} did not finish this test: {self._job.last_words()}")

    def _lost(self, item: MpiItem, text: str) -> list[pytest.TestReport]:
        """End the job; a new one takes the other tests, if this test ended it."""
        if self._running != item.origin:
            self._hopeless = f"not run, because the job of {self.ranks} ranks ended outside of a test"
        self.close()
        if self._jobs > RESTARTS and not self._hopeless:
            self._hopeless = f"not run, because {self._jobs} jobs of {self.ranks} ranks were ended by a test"
        return [_failure(item, text)]

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


def _told(item: pytest.Item, run: Callable[[], list[pytest.TestReport]]) -> bool:
    """Report a test as pytest does; True: it has been run."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run():
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


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
    """A test on one number of ranks; ``origin`` is its name on the ranks."""

    def __init__(self, *, ranks: int, test: pytest.Function, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ranks = ranks
        self.origin, self.origin_name, self.origin_location = test.nodeid, test.name, test.location
        for mark in test.own_markers:
            self.add_marker(getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs))
        if ranks == 1:
            self.add_marker("alone")

    def reportinfo(self) -> tuple[Path, int | None, str]:
        _, line, domain = self.origin_location
        return self.path, line, domain.replace(self.origin_name, self.name, 1)

    def runtest(self) -> None:
        raise NotImplementedError


class Parent:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
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

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Collector) -> Any:
        """Put an item for each number of ranks in the place of a test that is marked as ``mpi``."""
        made = yield
        if not isinstance(made, list):
            return made
        items: list[pytest.Item] = []
        for item in made:
            if item.get_closest_marker("mpi") is None:
                items.append(item)
                continue
            if launcher.mpiexec() is None:
                raise collector.CollectError(launcher.NO_MPIEXEC)
            items += [
                MpiItem.from_parent(collector, name=f"{item.name}[np={ranks}]", ranks=ranks, test=item)
                for ranks in self._given or tiers.numbers(item, self._config.option.long)
            ]
        return items

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if "mpi4py.MPI" in sys.modules:
            # pytest asks every object of a file whether it is a test, mpiddp's lazy MPI too, which starts MPI then.
            pytest.exit(f"{report.nodeid} starts MPI when it is imported: use mpiddp.mpi's lazy.MPI", returncode=1)

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
            # The test before may have kept collectors for one of MPI, which is not run here.
            item.session._setupstate.teardown_exact(item)
            if _is_plain(item) and self._config.option.capture != "no":
                # A rank needs one core, and this process another.
                self._runner(1, item.session).start()
            return self._aside(item)
        return _told(item, lambda: self._runner(item.ranks, item.session).run(item))

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
        return _told(item, lambda: self._of_a_fork(item))

    def _of_a_fork(self, item: pytest.Item) -> list[pytest.TestReport]:
        found = self._workers.run(item.nodeid)
        if isinstance(found, str):
            text = f"the process of {item.path.name} ended before it told of this test: {found}"
            return [pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")]
        return [_from_data(self._config, data) for data in found]

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
    return not isinstance(item, MpiItem) and not _starts_launchers(item)


def _starts_launchers(item: pytest.Item) -> bool:
    return item.get_closest_marker("launch") is not None


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Put the environment back: the command line sets BLAS threads, and later tests start programs."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Start a test from an environment without launchers, settings and numbers of threads."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MPIDDP_", "PMI", "OMPI_", "SLURM_", "MPI_LOCAL")
    for name in [each for each in os.environ if each.startswith((*ranks, *THREAD_VARIABLES))]:
        monkeypatch.delenv(name)
    return monkeypatch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks", metavar="N,...", help="numbers of ranks of `mpi` tests (default: 3; of `core` tests 1,2,3,4)"
    )
    parser.addoption("--at-once", metavar="N", type=int, default=3, help="files with `launch` tests side by side")


# Last: pytest-mpi has registered its plugin, which would skip the unit tests of a folder named mpi.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            config.pluginmanager.unregister(plugin)
    config.pluginmanager.register(Parent(config), "mpi-parent")
    config.pluginmanager.register(Summary(config), "parts")
    # As Ctrl-C: pytest ends in order, and no launcher is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
