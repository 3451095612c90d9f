"""Uncaught exceptions of a rank, Ctrl-C among them, end the job with their traceback."""

import os
import sys
import time
import traceback
from types import TracebackType
from typing import NoReturn

from mpiddp import errors, launchers, rank_process, settings
from mpiddp.mpi.finalize import finalized
from mpiddp.mpi.operation import Operation

from . import abort as ending, activity
from .abort import ANSWER_S, abort

# Time for rank 0 to print a set-up error and end the job, or for a lower rank to print that it was interrupted.
_SILENT_S = 5.0

_OF_ALL = errors.DistTimeoutError, errors.MismatchError, errors.RankFailedError

_owner_pid = 0


def install() -> None:
    """Install a hook that ends the job at an uncaught exception, except in programs that a rank starts."""
    global _owner_pid
    if _owner_pid:
        return
    _owner_pid = os.getpid()
    announced = launchers.launch()
    if announced is not None and rank_process.started_by_rank() is None:
        ending.this_rank = ending.ThisRank(announced.rank, announced.size, announced.rank, announced.size == 1)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if ending.this_rank.alone or os.getpid() != _owner_pid or finalized() or _left_to_host(error):
            previous(kind, error, trace)
        elif isinstance(error, errors.SetupError):
            if ending.this_rank.rank != 0:
                time.sleep(_SILENT_S)
                os._exit(1)
            abort(f"{kind.__name__}: {error}", 1)
        elif issubclass(kind, KeyboardInterrupt):
            lines, operation = activity.unwind(trace)
            interrupt(lines, operation)
        else:
            activity.unwind(trace)
            text = "".join(traceback.format_exception(kind, error, trace))
            # All ranks write their flight recorders after an error of communication, and if MPIDDP_FLIGHT_RECORDER is
            # set also after any other error.
            dumps = isinstance(error, _OF_ALL) or settings.flight_recorder()
            abort(lambda: text + _others(error), _exit_code(error), kind.__name__ if dumps else "")

    sys.excepthook = hook


def _left_to_host(error: BaseException) -> bool:
    """Return True if a program in another language has started Python in this process, and goes on after an error.

    If a job has been started, that is so only if errors are raised on all ranks. The other ranks of this rank's groups
    are then told that it has given the groups up.
    """
    found = ending.reports
    if sys.orig_argv or (found is not None and not found.liveness.raises):
        return False
    for link in found.liveness.links() if found else []:
        text = f"rank {ending.this_rank.rank} gave {link} up by an exception, {type(error).__name__}: {error}"
        link.monitor.find(errors.RankFailedError(text, [ending.this_rank.rank]))
    return True


def _others(error: BaseException) -> str:
    reports = ending.reports
    if not isinstance(error, errors.MismatchError) or reports is None:
        return ""
    ranks = [rank for rank in error.ranks if rank != ending.this_rank.rank]
    return f"{reports.doing(ranks, ANSWER_S)}\n" if ranks else ""


def _exit_code(error: BaseException) -> int:
    codes = ((errors.DistTimeoutError, errors.EXIT_TIMEOUT), (errors.MismatchError, errors.EXIT_MISMATCH))
    return next((code for kind, code in codes if isinstance(error, kind)), 1)


def interrupt(lines: str, operation: Operation | None) -> NoReturn:
    """End the job after a Ctrl-C. If lower ranks are interrupted, too, they get time to report first."""
    reports = ending.reports
    if reports is None:
        abort(interrupted(lines, operation, ""), errors.EXIT_INTERRUPTED)
    reports.liveness.interrupted = True

    def text() -> str:
        others = reports.explain(operation, ANSWER_S)
        ending.wait(_SILENT_S, until=lambda: not reports.liveness.interrupted_before())
        return interrupted(lines, operation, others)

    abort(text, errors.EXIT_INTERRUPTED)


def interrupted(lines: str, operation: Operation | None, others: str) -> str:
    where = "" if operation is None else f" in {operation}"
    unmatched = "" if operation is None else operation.members.monitor.unmatched()
    return f"{lines}interrupted (Ctrl-C){where}{others}" + (f"\n  {unmatched}" if unmatched else "")
