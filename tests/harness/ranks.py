"""The pytest plugin of the ranks: every rank runs the same tests, and one rank's failure is every rank's.

After each test the ranks agree on its outcome. A failed rank that the others leave waiting, or a test beyond the limit,
ends the job with the failures and stacks of all ranks. Importing it starts MPI.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mpi4py import MPI

from harness import launcher

LIMIT_S = float(os.environ.get("MPIDDP_TEST_LIMIT", "60"))
"""For a test, set-up and waiting for other ranks included."""
AROUND_S = max(LIMIT_S, 60.0)
"""For collecting the tests, and for leaving."""
GRACE_S = float(os.environ.get("MPIDDP_TEST_GRACE", "5"))
"""That a failed rank waits for the others."""
STACKS = signal.SIGRTMAX - 3
"""Makes a rank write its stacks; faulthandler does it even inside MPI."""


class Watchdog(threading.Thread):
    """Ends the job, with the failures and stacks of all ranks, at this rank's deadline."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._ranks = ranks
        self._deadline: float | None = None
        self._doing = ""

    def expect(self, doing: str, within_s: float) -> None:
        self._doing, self._deadline = doing, time.monotonic() + within_s
        # A rank that holds the GIL for ever keeps Python threads from saying so.
        faulthandler.dump_traceback_later(within_s + 10, exit=True, file=self._ranks.stderr)

    def hurry(self, within_s: float) -> None:
        if self._deadline is not None:
            self._deadline = min(self._deadline, time.monotonic() + within_s)

    def rest(self) -> None:
        self._deadline = None
        faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        while True:
            time.sleep(0.1)
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._ranks.give_up(self._doing)


class Ranks:
    def __init__(self, config: pytest.Config) -> None:
        world = MPI.COMM_WORLD
        self.config = config
        self.rank, self.size = world.rank, world.size
        plan = os.environ.get(launcher.PLAN)
        self.plan: dict[str, Any] = json.loads(Path(plan).read_text()) if plan else {}
        announced = self.plan.get("ranks") or launcher.announced_size()
        if self.size != announced:
            raise pytest.UsageError(
                f"the launcher started {announced} ranks but MPI sees {self.size}: mpiexec belongs to another MPI "
                f"library than mpi4py ({MPI.Get_library_version().splitlines()[0]}); start with {launcher.mpiexec()}"
            )
        if not hasattr(config.option, "with_mpi"):
            raise pytest.UsageError("the MPI tests need pytest-mpi: pip install 'mpiddp[test]'")
        config.option.with_mpi = True
        # pytest captures descriptor 2; a copy always reaches the terminal.
        self.stderr = os.fdopen(os.dup(2), "w")
        self._comm = world.Dup()
        folder = self.plan.get("folder") or (tempfile.mkdtemp(prefix="mpiddp-ranks-") if self.rank == 0 else None)
        self._folder = Path(self._comm.bcast(folder))
        self._folder.mkdir(exist_ok=True)
        self._peers: list[tuple[str, int]] = self._comm.allgather((socket.gethostname(), os.getpid()))
        self._stacks = self._file(self.rank, "stacks").open("w")
        # This thread's only: frames of a running one may go away while they are read (seen: SIGSEGV).
        faulthandler.register(STACKS, file=self._stacks, all_threads=False)
        self._collect_errors: list[str] = []
        self._retired: list[MPI.Comm] = []
        self.last_failed = False
        """On any rank."""
        self._watchdog = Watchdog(self)
        self._watchdog.start()
        self._watchdog.expect("collecting the tests", AROUND_S)

    def tell(self, **event: Any) -> None:
        """Write an event for the parent, if there is one."""
        if self.plan:
            line = (json.dumps(event, default=str) + "\n").encode()
            # One write: two ranks may tell at once.
            with Path(self.plan["events"]).open("ab", buffering=0) as file:
                file.write(line)

    def agree(self, value: Any) -> list[Any]:
        """Return every rank's value; waiting sleeps, for ranks that still work need the cores."""
        request = self._comm.Ibarrier()
        while not request.Test():
            time.sleep(0.0005)
        return self._comm.allgather(value)

    def use_up_communicator_ids(self) -> None:
        """Keep MPICH from giving a freed communicator's id, and the messages that lie there, to a new one."""
        self._retired += [MPI.COMM_WORLD.Dup() for _ in range(24)]

    def give_up(self, doing: str) -> None:
        """End the job; a parent starts another one for the remaining tests."""
        try:
            os.close(os.open(self._file(0, "lock"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            # Another rank is already at it; should it fail, this one ends the job.
            time.sleep(15)
            os._exit(1)
        host = self._peers[self.rank][0]
        here = [pid for peer_host, pid in self._peers if peer_host == host]
        for pid in here:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS)
        end = time.monotonic() + 5
        while not all(map(_has_answered, here)) and time.monotonic() < end:
            time.sleep(0.01)
        pieces = [f"the ranks do not come together: {doing}"]
        for rank, (peer_host, _) in enumerate(self._peers):
            name = f"[rank {rank}/{self.size} {peer_host}]"
            failure, stacks = (self._read(rank, kind) for kind in ("failure", "stacks"))
            if failure:
                pieces.append(f"{name} failed, and waits for the others:\n{failure}")
            elif stacks:
                pieces.append(f"{name} is here (most recent call first):\n{_shorten(stacks)}")
            else:
                pieces.append(f"{name} did not answer")
        text = "\n\n".join(pieces)
        self.tell(fatal=text)
        self.stderr.write(f"\n{text}\n")
        self.stderr.flush()
        self._tidy()
        # Else Open MPI's banner would come in between.
        time.sleep(0.2)
        MPI.COMM_WORLD.Abort(1)

    def _tidy(self) -> None:
        """Remove our folder; the parent reads and removes its own."""
        if not self.plan:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, rank: int, kind: str) -> Path:
        return self._folder / f"{rank}.{kind}"

    def _read(self, rank: int, kind: str) -> str:
        file = self._file(rank, kind)
        return file.read_text(errors="replace").strip() if file.exists() else ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collect_errors.append(f"{report.nodeid}\n{report.longreprtext}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if "run" in self.plan:
            order = {nodeid: place for place, nodeid in enumerate(self.plan["run"])}
            chosen = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
            self.config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
            items[:] = chosen

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        found = self.agree(([item.nodeid for item in session.items], self._collect_errors))
        self._watchdog.rest()
        if any(other != found[0] for other in found):
            pieces = ["the ranks do not collect the same tests"]
            for rank, (tests, errors) in enumerate(found):
                more = sorted(set(tests) - set(found[0][0]))
                pieces.append(f"[rank {rank}/{self.size}] {len(tests)} tests, not on rank 0: {more}, errors: {errors}")
            text = "\n".join(pieces)
            if self.rank == 0:
                self.tell(fatal=text)
            pytest.exit(text, returncode=1)

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self.tell(started=item.nodeid)  # every rank: a test may end the job before rank 0 has begun it
        self._watchdog.expect(item.nodeid, LIMIT_S)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        to_data = self.config.hook.pytest_report_to_serializable
        failed = [to_data(config=self.config, report=report) for report in reports if report.failed]
        failures = self.agree(failed)
        self._watchdog.rest()
        self._file(self.rank, "failure").unlink(missing_ok=True)
        self.last_failed = any(failures)
        if self.last_failed:
            reports = self._shared(reports, failures)
        for report in reports:
            if self.rank == 0:
                self.tell(report=to_data(config=self.config, report=report))
            item.ihook.pytest_runtest_logreport(report=report)
        if self.rank == 0:
            self.tell(finished=item.nodeid)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report: pytest.TestReport = yield
        if report.failed:
            with self._file(self.rank, "failure").open("a") as file:
                file.write(_text(report) + "\n")
            self._watchdog.hurry(GRACE_S)
        return report

    def pytest_internalerror(self, excrepr: object) -> None:
        self._end_job(str(excrepr))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # pytest.exit comes here too; every rank calls that one together.
        if excinfo.errisinstance(KeyboardInterrupt):
            self._end_job(str(excinfo.getrepr(style="short")))

    def pytest_unconfigure(self) -> None:
        self._watchdog.expect("leaving pytest", AROUND_S)
        # A launcher may end the others as soon as one rank has left with an error, and rank 0 is still printing.
        self.agree(None)
        self._watchdog.rest()
        if self.rank == 0:
            self._tidy()
        # Until the process is gone: MPI_Finalize can hang.
        faulthandler.dump_traceback_later(AROUND_S, exit=True, file=self.stderr)

    def _end_job(self, text: str) -> None:
        """Print why this rank alone cannot go on, and end the others too."""
        self.stderr.write("\n".join(f"[rank {self.rank}/{self.size}] {line}" for line in text.splitlines()) + "\n")
        self.stderr.flush()
        time.sleep(0.2)
        MPI.COMM_WORLD.Abort(1)

    def _shared(
        self, reports: list[pytest.TestReport], failures: list[list[dict[str, Any]]]
    ) -> list[pytest.TestReport]:
        """Return every rank's reports of a test that failed somewhere."""
        shared = []
        for when in ("setup", "call", "teardown"):
            failed = {
                rank: self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
                for rank, own in enumerate(failures)
                for data in own
                if data["when"] == when
            }
            if failed:
                shared.append(_joint(failed, self.size))
            elif when != "call":
                shared += [report for report in reports if report.when == when]
        return shared


def _joint(failed: dict[int, pytest.TestReport], size: int) -> pytest.TestReport:
    """Join the ranks' failures: the first one's report, with a section for each that differs."""
    first, *others = failed
    joint = failed[first]
    if size == 1:
        return joint
    path, line, domain = joint.location
    joint.location = path, line, f"{domain} (rank {first} of {size})"
    same = [rank for rank in others if _crash(failed[rank]) == _crash(joint)]
    well = [rank for rank in range(size) if rank not in failed]
    notes = [f"the traceback is rank {first}'s"]
    notes += [f"the same on {_ranks(same)}"] if same else []
    notes += [f"no failure on {_ranks(well)}"] if well else []
    joint.sections.append((f"{size} ranks: " + "; ".join(notes), ""))
    for rank in others:
        if rank not in same:
            joint.sections.append((f"rank {rank} of {size} failed with", _text(failed[rank])))
    return joint


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _crash(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash) if crash else report.longreprtext


def _text(report: pytest.TestReport) -> str:
    return "\n".join([report.longreprtext, *(f"--- {title}\n{text}" for title, text in report.sections)])


def _has_answered(pid: int) -> bool:
    """Return True if a process has taken `STACKS`, neither pending nor blocked, or is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    masks = re.findall(r"^(?:SigPnd|ShdPnd|SigBlk):\t(\w+)", status, re.MULTILINE)
    return not any(int(mask, 16) >> (STACKS - 1) & 1 for mask in masks)


def _shorten(stack: str) -> str:
    lines = stack.splitlines()
    end = next((i for i, line in enumerate(lines) if "/_pytest/" in line or "/pluggy/" in line), len(lines))
    return "\n".join(lines[:end])


# Last: after the terminal reporter; pytest-mpi has seen no --with-mpi, or it would print a banner.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Meet the other ranks, and silence all but rank 0: their reports say it."""
    ranks = Ranks(config)
    config.pluginmanager.register(ranks, "ranks")
    if ranks.rank > 0:
        config.pluginmanager.unregister(name="terminalreporter")
