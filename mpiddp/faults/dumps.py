"""Dumps of the flight recorder: a file of JSON lines for each rank, which `flight` reads.

The first line is about the rank and its groups; each other line is one call, the oldest first.
"""

import contextlib
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpiddp import settings
from mpiddp.mpi import recorder
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.operation import Members, Operation
from mpiddp.mpi.world import World

from .liveness import Liveness, Tag

_WRITTEN_S = 5.0
"""Time for the other ranks to write their dumps. Watchdogs look twice a second, later where many ranks share a core."""


class Dumps:
    def __init__(self, liveness: Liveness, world: World) -> None:
        self._liveness, self._world, self._rank = liveness, world, world.rank
        given = settings.flight_recorder()
        default = Path(tempfile.gettempdir()) / f"mpiddp-{os.getuid()}-{world.job}" / "rank_"
        self._prefix = f"{Path.cwd()}/" * (not given.startswith("/")) + given if given else str(default)
        self._wanted, self._own_folder = given != "0", given is not None
        liveness.questions[Tag.DUMP] = self.write

    def collect(self, reason: str) -> str:
        """Let all ranks write their dumps; return a line that names the files, or "" if dumps are not wanted."""
        if not self._wanted:
            return ""
        reason = f"rank {self._rank}: {reason}"
        others, count = self._liveness.awaited(None), int(self.write(reason))
        with contextlib.suppress(MPI.Exception):  # MPI raises it if a rank has failed
            if self._world.thread_multiple:
                self._liveness.question(others, Tag.DUMP, reason)
                count += sum(self._liveness.heard_from(others, _WRITTEN_S, Tag.DUMP, reason).values())
        where = ", each on its node" if len(set(self._world.hosts)) > 1 and not self._own_folder else ""
        files = f"{self._prefix}*"
        return (
            f"flight recorder: {count} of {self._world.size} ranks wrote {files}{where};"
            f" `python -m mpiddp flight {files}` shows where they part"
        )

    def write(self, reason: str) -> bool:
        with contextlib.suppress(Exception):  # no error may end the watchdog's thread, which may call this
            path = Path(f"{self._prefix}{self._rank}")
            if self._own_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            elif not _is_private(path.parent):
                return False
            # The new file's name is random, because somebody else may have put a link at any name that can be guessed.
            descriptor, part = tempfile.mkstemp(prefix=".", dir=path.parent)
            with os.fdopen(descriptor, "w") as file:
                file.writelines(json.dumps(each) + "\n" for each in self.lines(reason))
            Path(part).replace(path)
            return True
        return False

    def lines(self, reason: str) -> Iterator[dict[str, Any]]:
        operations = [each for each in recorder.entries() if each.members.name]
        groups = {each.members.number: each.members for each in operations}
        yield {
            "job": self._world.job,
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "reason": reason,
            "time": time.time(),
            "groups": {
                _name(group): {"description": group.description, "ranks": list(group.ranks)}
                for group in groups.values()
            },
        }
        yield from map(_line, operations)


def _is_private(folder: Path) -> bool:
    """Make a folder in one that all users write to; return False if it is somebody else's, or a link."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _line(operation: Operation) -> dict[str, Any]:
    record, since_1970_s = operation.call.record, time.time() - time.monotonic()
    return {
        "group": _name(operation.members),
        "number": operation.number,
        "call": operation.text() if record is None else record.text(operation.number),
        # The numbers that the ranks compare; null for a message.
        "compared": None if record is None else [record.kind >> 1, record.length, record.root],
        "began": since_1970_s + operation.start,
        "ended": since_1970_s + operation.end if operation.end else None,
        "queued": operation in operation.members.queue.operations()[1:],
        "file": operation.code.co_filename,
        "line": recorder.line_number(operation.code, operation.offset),
        "function": operation.code.co_name,
    }


def _name(group: Members) -> str:
    """Return a group's name with its number, which is equal on all ranks and makes the name unique in the job.

    A process counts only its own groups, so groups of different ranks may have the same `group_name`.
    """
    return f"{group.name}.{group.number & 0xFFFFFFFF}"
