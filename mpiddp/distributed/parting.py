"""The end of groups: their ranks compare the calls that nothing has compared yet."""

import time
from collections.abc import Sequence

from mpiddp.algorithms import plan as planning
from mpiddp.errors import DistError, MismatchError
from mpiddp.mpi import requests
from mpiddp.mpi.lazy import MPI

from .dispatch import submit
from .groups import ProcessGroup

_NAME = "destroy_process_group"
_WAIT_S = 2.0
"""The longest wait for the other ranks: one may have left the group after an error, or may never destroy it."""


def part(ending: Sequence[ProcessGroup]) -> MismatchError | None:
    """Meet the other ranks of the groups, or give up; return the error of the first group whose calls differ."""
    errors: list[MismatchError] = []
    works = []
    for group in ending:  # all barriers begin before any wait, because ranks may have made the groups in any order
        link = group._link
        if link.size > 1 and link.comms and not group._monitor.survivable:
            try:
                works.append((group, submit(group, planning.barrier(link, _NAME), (None,), ())))
            except MismatchError as error:
                errors.append(error)
            except DistError:
                pass  # another rank may have ended the group, as after a timeout
    deadline = time.monotonic() + _WAIT_S
    for group, work in works:
        try:
            if requests.poll_until(work.is_completed, work._operation, max(deadline - time.monotonic(), 0.0)):
                work.wait()
                group._monitor.check()
                continue
        except MismatchError as error:
            errors.append(error)
        except (DistError, MPI.Exception):
            pass  # such as a failed rank, which need not be reported when the groups end anyway
        group._link.discard()
    return errors[0] if errors else None
