"""The watchdog: a thread that ends the job, with the reason, if this process waits in vain.

If errors are raised on all ranks (`Job.raises`), waits check their time limits themselves. The watchdog then only lets
the ranks raise an error when one of them has left.

Twice a second it looks at what each thread of the program waits for (`operation.waiting`). It knows waits by their
numbers, so that no array is kept alive. It also sees a Ctrl-C while the main thread waits in MPI, where Python would
not see it. The thread needs MPI_THREAD_MULTIPLE.
"""

import contextlib
import faulthandler
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Sequence

from mpiddp import settings
from mpiddp.errors import EXIT_MISMATCH, EXIT_TIMEOUT, RankFailedError
from mpiddp.mpi import requests
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.operation import Operation, waiting

from . import abort as ending, activity, marker
from .abort import abort
from .job import Job
from .liveness import Tag
from .mpirun import Mpirun
from .uncaught import interrupt, interrupted
from .where_socket import WhereSocket

LOOK_S = 0.5
# How long a rank waits for one whose program has ended, before it ends the job or lets all ranks raise an error.
PATIENCE_S = 3.0
# The time that Python gets to handle a Ctrl-C itself, as it does outside of MPI.
INTERRUPT_S = 0.3
# How long, and how often, the thread looks after a signal, because other ranks may soon ask what this one does.
_ALERT_S, _ALERT_LOOK_S = 1.5, 0.02
_LAST_ANSWER_S = 0.1
_WRITTEN_S = 0.01
_STOP = b"\0"


class _Wait:
    def __init__(self, operation: Operation, warn_after_s: float) -> None:
        self.identity, self.since = operation.identity, operation.start
        self.asked = 0.0
        self.distance_s = warn_after_s
        self.warn_s = warn_after_s or math.inf
        self.interrupted_at = math.inf
        self.told = False
        """True if all ranks have been told to raise an error, because one of them has left."""


class Watchdog:
    def __init__(self, job: Job, resting: Sequence[Job] = ()) -> None:
        self._world, self._liveness, self._failures, self._between_nodes, self._reports, _, self._raises = job
        self._answered = [each.liveness for each in (*resting, job)]
        """The liveness of each job whose questions this thread answers. If this job is a communicator's, the world's
        job, which rests, is among them."""
        self._warn_after_s = settings.warn_after_s()
        self._waits: dict[int, _Wait] = {}
        self._alert_until = 0.0
        self._continued_in: Operation | None = None
        self._all_run = False
        self._mpirun = Mpirun(job.world.rank)
        # Python's C-level signal handler writes to this pipe, whatever the main thread does.
        self._signals, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            others = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            if others != -1:
                signal.set_wakeup_fd(others)  # an event loop has set this one, and needs it
            if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
                signal.signal(signal.SIGUSR2, lambda *_: None)  # the thread gets the signal through the pipe
            # A forked child must not send its signals to this process.
            os.register_at_fork(after_in_child=self._let_go)
        self._where = WhereSocket(job.world.job, job.world.rank)
        _tell_of_crashes()
        # When a process crashes, only its stacks are printed. The name of this thread's function tells the rank.
        watch = types.FunctionType(Watchdog._watch.__code__.replace(co_name=ending.label()), globals())
        self._thread = threading.Thread(target=watch, args=(self,), name="mpiddp-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. This must be called before MPI is finalised."""
        self._mpirun.release()
        self._let_go()
        os.write(self._writer, _STOP)
        self._thread.join()
        for end in (self._signals, self._writer):
            os.close(end)
        self._where.close()

    def _let_go(self) -> None:
        with contextlib.suppress(ValueError):  # it is raised outside of the main thread
            heard = signal.set_wakeup_fd(-1)
            if heard not in (-1, self._writer):
                signal.set_wakeup_fd(heard)

    def _watch(self) -> None:
        heard: list[int | socket.socket] = [self._signals, *self._where.sockets]
        while True:
            alert = time.monotonic() < self._alert_until
            ready, _, _ = select.select(heard, [], [], _ALERT_LOOK_S if alert else LOOK_S)
            numbers = os.read(self._signals, 64) if self._signals in ready else b""
            if _STOP in numbers:
                return
            try:
                marker.renew(self._world.rank)
                for each in self._answered:
                    each.progress()
                self._between_nodes.look()
                if signal.SIGCONT in numbers:
                    self._continued()
                if signal.SIGTERM in numbers:
                    self._terminated()
                if signal.SIGUSR2 in numbers:
                    ending.write(self._survey() + "\n")
                if any(each in ready for each in self._where.sockets):
                    self._where.answer(self._survey)
                self._look(signal.SIGINT in numbers)
            except MPI.Exception as error:
                self._mpirun.release()
                if self._failures.caused(error):
                    self._failures.revoke()
                else:
                    warnings.warn(f"the watchdog stops, and no hang is noticed any more: {error}", stacklevel=2)
                return

    def _continued(self) -> None:
        """Ask the other ranks for their states now, because there is no time for it when SIGTERM comes."""
        self._alert_until = time.monotonic() + _ALERT_S
        _, self._continued_in = activity.current()
        if self._mpirun.handles_termination():
            self._all_run = self._mpirun.all_run()
            self._reports.ask(self._continued_in)

    def _terminated(self) -> None:
        """Report that mpirun ends the job, unless a rank has failed, and end this process."""
        if not self._mpirun.handles_termination():
            return
        announced = time.monotonic() < self._alert_until
        if announced and self._all_run and not (Tag.ENDING in self._liveness.heard or ending.ends()):
            # mpirun may kill this process at any moment, so the lines that need no other rank are written first.
            lines = activity.stack(threading.main_thread().ident or 0)
            self._mpirun.write(ending.labelled(interrupted(lines, self._continued_in, "")))
            self._mpirun.write(ending.labelled(self._reports.answers(self._continued_in, _LAST_ANSWER_S)))
        self._mpirun.terminate()

    def _look(self, interrupted: bool) -> None:
        operations, now = dict(waiting), time.monotonic()
        main = threading.main_thread().ident or 0
        if interrupted:
            self._alert_until = now + _ALERT_S
            self._liveness.interrupted = _python_handles_interrupts()
        identities = {thread: operation.identity for thread, operation in operations.items()}
        seen = {thread: wait for thread, wait in self._waits.items() if wait.identity == identities.get(thread)}
        self._waits = {each: _Wait(operations[each], self._warn_after_s) for each in identities} | seen
        # A wait that has begun after the signal may belong to the program's own handling of the signal.
        if main in seen:
            if interrupted and self._liveness.interrupted:
                seen[main].interrupted_at = now
            if now - seen[main].interrupted_at > INTERRUPT_S:
                interrupt(activity.stack(main), operations[main])
        for thread, wait in seen.items():
            self._judge(thread, operations[thread], wait, now)
        if requests.pending and any(not operation.limited for operation in operations.values()):
            requests.poll()  # one thread blocks in MPI, so perhaps no thread polls the pending operations

    def _judge(self, thread: int, operation: Operation, wait: _Wait, now: float) -> None:
        def still() -> bool:
            return waiting.get(thread) is operation

        limited = operation.limited or self._raises
        waited_s = now - wait.since
        # A thread that checks its time limit itself also compares calls itself.
        if not limited and operation.members.monitor.disagreement() is not None:
            # After this pause a record that was being stored is whole.
            time.sleep(_WRITTEN_S)
            error = operation.members.monitor.disagreement()
            if error is not None and still():
                abort(f"{activity.stack(thread)}{error}", EXIT_MISMATCH, "mismatch")
        gone = self._liveness.exited_ranks(operation) if waited_s > PATIENCE_S else []
        if gone and still():
            if not self._raises:
                abort(lambda: self._desertion(thread, operation), 1, "a missing rank")
            elif not wait.told:
                wait.told = True
                operation.members.monitor.find(RankFailedError(self._desertion(thread, operation), gone))
        if not limited and waited_s > operation.members.timeout_s and still():
            abort(lambda: self._timeout(thread, operation), EXIT_TIMEOUT, "timeout")
        # The question is sent early, so that the answer has come when the wait has lasted for `PATIENCE_S`.
        if waited_s > PATIENCE_S - 3 * LOOK_S and now - wait.asked > PATIENCE_S:
            self._liveness.ask(operation.members.number, self._liveness.first_asked(operation))
            wait.asked = now

        if waited_s > wait.warn_s:
            next_s, long_s = 2 * wait.distance_s, self._warn_after_s / 2
            text = self._reports.warning(operation, waited_s, next_s, long_s)
            if text:
                wait.distance_s = next_s
            # If another rank is to warn, this one tries again soon, because the other may go on without a warning.
            wait.warn_s = waited_s + (next_s if text else long_s)
            if text and still():
                ending.write(text + "\n")

    def _survey(self) -> str:
        found = [operation.members.number for operation in waiting.values()]
        return self._reports.survey(found[0] if found else 0)

    def _desertion(self, thread: int, operation: Operation) -> str:
        explained = self._reports.explain(operation)  # this asks all ranks of the operation, not only the first
        gone = self._liveness.exited_ranks(operation)
        s, have = ("s", "have") if len(gone) > 1 else ("", "has")
        who = f"program{s} of rank{s} {', '.join(map(str, gone))} {have}"
        if operation.call.tag is not None:
            lies = "".join(f"; {each}" for each in [operation.members.monitor.unmatched()] if each)
            taken = "received" if operation.call.sends else "sent"
            return (
                f"{activity.stack(thread)}{operation} cannot end: the {who} ended and not {taken} it{lies}. Every send"
                f" needs a receive in the same group, whose source and tag are those of the message{explained}"
            )
        return (
            f"{activity.stack(thread)}{operation} cannot end: the {who} ended without taking part in it. Every rank has"
            " to call the same operations in the same order; look for a loop, an early return or a sys.exit that only"
            f" some ranks reach (uneven inputs: DistributedDataParallel.join){explained}"
        )

    def _timeout(self, thread: int, operation: Operation) -> str:
        reason = operation.members.monitor.explain(operation)
        return f"{activity.stack(thread)}{operation} did not finish in {operation.members.timeout_s:g} s{reason}"


def _tell_of_crashes() -> None:
    """Print the stacks of a process that crashes, as with a segmentation fault, unless the program has seen to it."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no stderr
            faulthandler.enable(sys.__stderr__ or sys.stderr)


def _python_handles_interrupts() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
