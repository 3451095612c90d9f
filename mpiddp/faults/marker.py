"""The marker: a file that tells ``python -m mpiddp run`` that its job lives, and in the end that it has ended well.

Exit codes do not tell that. The launcher's exit code is 0 also when Open MPI has lost a node, and when a rank of MPICH
ends by ``os._exit(0)``.
"""

import contextlib
import os
from pathlib import Path

from mpiddp import rank_process
from mpiddp.errors import SetupError

RUNNING, WATCHED, ENDED = "running", "watched", "ended"
"""The contents of a marker. Rank 0 of a watched job renews the marker while it lives."""


def begin(rank: int, watched: bool) -> None:
    """Write the marker; SetupError if that fails, because a job that ends well would then count as failed."""
    path = _path(rank)
    if path is not None:
        try:
            path.write_text(WATCHED if watched else RUNNING)
        except OSError as error:
            raise SetupError(
                f"MPIDDP_MARKER={path} cannot be written ({error}): start `python -m mpiddp run` in a folder that the"
                " node of rank 0 sees, too"
            ) from error


def renew(rank: int) -> None:
    path = _path(rank)
    if path is not None:
        with contextlib.suppress(OSError):
            os.utime(path)


def end(rank: int) -> None:
    """Write that the job has ended well. The caller has waited for the ends of all ranks' programs."""
    path = _path(rank)
    if path is not None:
        with contextlib.suppress(OSError):  # the supervisor may have gone, with its folder
            path.write_text(ENDED)


def _path(rank: int) -> Path | None:
    """Return rank 0's marker; None on other ranks, without a supervisor, and in a program that a rank has started."""
    text = os.environ.get(rank_process.MARKERS[0])
    return Path(text) if text and rank == 0 and rank_process.started_by_rank() is None else None
