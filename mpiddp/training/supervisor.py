"""``python -m mpiddp run``: start a job again when it fails, as torchrun's ``--max-restarts`` does.

The supervisor is the launcher's parent process and does not use MPI. A job has ended well if its launcher returns 0 and
its marker file says that all ranks have ended (see `mpiddp.faults.marker`).
"""

import argparse
import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from mpiddp import rank_process
from mpiddp.errors import EXIT_CHECKPOINTED, EXIT_INTERRUPTED
from mpiddp.faults import marker

from .options import UsageError, refusing

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_FINAL = (UsageError.exit_code, EXIT_CHECKPOINTED, EXIT_INTERRUPTED)
"""Exit codes after which the job is not started again. The same command would fail again (a wrong request), the batch
system starts it again (after a checkpoint), or the user interrupted it."""
_FRUITLESS = 2
"""The supervisor gives up after this many restarts in a row without progress."""
_LOOK_S, _GRACE_S = 0.1, 10.0
_PAUSES_S = (1.0, 5.0, 25.0, 60.0)
"""Seconds to wait before the first restart, the second, and so on; the last pause repeats. A failed host needs time to
come back."""
_LONG_S = 60.0
"""If a job has run for more than this many seconds, the next pause is the first of `_PAUSES_S` again."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="start again at most N times (3)")
    parser.add_argument(
        "--watch",
        type=Path,
        metavar="DIR",
        help="folder in which new files are progress: two restarts in a row without any are the last; of train, the"
        " checkpoints in its --output",
    )
    parser.add_argument(
        "--lost-after",
        type=float,
        default=300.0,
        metavar="S",
        help="end a job whose rank 0 has shown no life for S seconds, as when its node is lost and mpirun waits (300)",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: mpirun or srun, and the program")


def run(options: argparse.Namespace) -> int:
    """Run a job: python -m mpiddp run --restarts 3 -- mpirun -np 4 python -m mpiddp train --output DIR.

    When the job ends badly it is started again. train goes on from its last checkpoint, and a program of your own has
    to do so, too.
    """
    if options.restarts < 0:
        raise UsageError(f"--restarts has to be at least 0, got {options.restarts}")
    if not options.lost_after > 0:
        raise UsageError(f"--lost-after has to be positive, got {options.lost_after}")
    command = Command(options.command)
    with _marker_file() as path:
        supervisor = Supervisor(command, options.watch or command.checkpoints(), path, options.lost_after)
        return supervisor.run(options.restarts)


_TRAIN = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
"""The parser of those options of ``train`` that the supervisor needs. It gets only the words after ``mpiddp train``,
because the launcher may have options of the same names."""
for _name in ("--output", "--config", "--resume"):
    _TRAIN.add_argument(_name, nargs="?")


class Command:
    """The command line of a job: the launcher and the program.

    UsageError for ``mpiddp train`` with neither ``--output`` nor ``--config``: it has no checkpoints to go on from.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        pairs = enumerate(itertools.pairwise(words), 2)
        begins = next((at for at, (one, other) in pairs if Path(one).name == "mpiddp" and other == "train"), None)
        self._given = None if begins is None else _TRAIN.parse_known_args(self.words[begins:])[0]
        if self._given and not (self._given.output or self._given.config):
            raise UsageError("train needs --output DIR to go on from its last checkpoint when it is started again")

    def again(self) -> list[str]:
        """Return the command line for a restart. ``mpiddp train`` without ``--resume`` gets ``--resume auto``."""
        return [*self.words, "--resume", "auto"] if self._given and not self._given.resume else self.words

    def checkpoints(self) -> Path | None:
        return Path(self._given.output) / "checkpoints" if self._given and self._given.output else None


class _End(NamedTuple):
    code: int
    """The launcher's exit code, or 128 plus the signal's number if a signal ended the launcher."""
    marked: str
    """Content of the marker file; empty if no rank has written the file."""
    lost: bool
    """True if the supervisor ended the job, because rank 0 no longer renewed the marker file."""

    @property
    def well(self) -> bool:
        return self.marked == marker.ENDED and self.code == 0


class Supervisor:
    """The process that starts a job, and starts it again when it fails.

    A start has made progress if rank 0 wrote the marker file ``path`` and, unless ``watched`` is None, the job left new
    files in the folder ``watched``.
    """

    def __init__(self, command: Command, watched: Path | None, path: Path, lost_after_s: float) -> None:
        self._command, self._watched, self._path, self._lost_after_s = command, watched, path, lost_after_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        """True once this process has received one of the signals `_FORWARDED`. It then starts no job any more."""

    def run(self, restarts: int) -> int:
        """Run the job, with up to ``restarts`` restarts, and return the exit code of the last attempt.

        If that code is 0, but the job has not ended well, return 1. Meanwhile this process forwards the signals of
        `_FORWARDED` to the launcher.
        """
        with contextlib.ExitStack() as stack:
            for number in _FORWARDED:
                stack.callback(signal.signal, number, signal.signal(number, self._forward))
            return self._attempts(restarts)

    def _attempts(self, restarts: int) -> int:
        fruitless = short = 0
        ran = False
        for start in range(restarts + 1):
            words = self._command.again() if start else self._command.words
            _say(f"start {start + 1} of at most {restarts + 1}: {shlex.join(words)}")
            before, began_s = self._newest(), time.monotonic()
            end = self._job(words)
            took_s = time.monotonic() - began_s
            took = f"after {took_s:.1f} s"
            if end.well:
                return 0
            if end.code == 0 and not end.marked:
                _say(
                    "the job ended with exit code 0, and no rank of it has written the marker: its program does not"
                    " call init_process_group, or its rank 0 has another environment (mpirun of Open MPI hands"
                    f" MPIDDP_MARKER to other hosts by -x MPIDDP_MARKER), or something has deleted {self._path.name}"
                )
                return 1
            how = "showed no life any more and was ended" if end.lost else f"ended with exit code {end.code}"
            if end.code == 0:
                how += ", but not all of its ranks have come to their end,"
            if self._stopped or (end.code in _FINAL and not end.lost):
                _say(f"the job {how} {took}; it is not started again")
                return end.code or 1
            made = bool(end.marked) and (self._watched is None or self._newest() > before)
            # No rank has written the marker, although ranks did in an earlier start: the launcher failed, perhaps
            # because a host is away. Such a start does not count as fruitless.
            away = ran and not end.marked
            ran = ran or bool(end.marked)
            fruitless = 0 if made or start == 0 else fruitless + (not away)
            _say(f"the job {how} {took}" + ("" if made else ", without progress"))
            if fruitless == _FRUITLESS:
                _say(f"given up: {fruitless} restarts in a row without progress")
                return end.code or 1
            short = 0 if took_s > _LONG_S else short
            if start < restarts and not self._pause(_PAUSES_S[min(short, len(_PAUSES_S) - 1)]):
                return end.code or 1
            short += 1
        _say(f"given up after {restarts + 1} starts")
        return end.code or 1

    def _pause(self, pause_s: float) -> bool:
        """Wait before a restart; return False if a signal asks for the end meanwhile."""
        _say(f"it is started again in {pause_s:g} s")
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self._stopped:
            time.sleep(_LOOK_S)
        return not self._stopped

    def _job(self, words: Sequence[str]) -> _End:
        """Run the job once. If it fails, kill those of its processes on this machine that are left."""
        self._path.write_text("")
        environment = os.environ | {rank_process.MARKERS[0]: str(self._path)}
        try:
            process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise UsageError(
                f"{words[0]} cannot be started ({error.strerror}): give launcher and program after --"
            ) from error
        self._process = process
        if self._stopped:
            process.terminate()
        lost = self._wait(process)
        code = process.returncode
        end = _End(code if code >= 0 else 128 - code, self._marker()[1], lost)
        if not end.well:
            self._kill_members()
        return end

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the launcher ends. Return True if this process ended it, because rank 0 showed no life."""
        renewed, since_s = 0, time.monotonic()
        while process.poll() is None:
            time.sleep(_LOOK_S)
            found, text = self._marker()
            if found != renewed:
                renewed, since_s = found, time.monotonic()
            if text == marker.WATCHED and time.monotonic() - since_s > self._lost_after_s:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
                process.kill()
                process.wait()
                return True
        return False

    def _marker(self) -> tuple[int, str]:
        """Return the marker file's modification time in nanoseconds, and its content.

        Return (0, "") while the file cannot be read; the job may write it again.
        """
        with contextlib.suppress(OSError):
            return self._path.stat().st_mtime_ns, self._path.read_text()
        return 0, ""

    def _kill_members(self) -> None:
        """Kill all processes of this machine that inherited the marker's environment variable from the job.

        Killing a process group would not reach them, because launchers put ranks into sessions of their own.
        """
        marks = {f"{name}={self._path}".encode() for name in rank_process.MARKERS}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if not marks.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                    os.kill(int(folder.name), signal.SIGKILL)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.send_signal(number)

    def _newest(self) -> int:
        """Return the modification time of the newest file in ``watched``, in nanoseconds; 0 if there is none."""
        newest = 0
        if self._watched is not None:
            for path in self._watched.rglob("[!.]*"):
                with contextlib.suppress(OSError):
                    if path.is_file():
                        newest = max(newest, path.stat().st_mtime_ns)
        return newest


@contextlib.contextmanager
def _marker_file() -> Iterator[Path]:
    """Make the marker file in the working directory, because rank 0 may be on another node that sees that folder."""
    with refusing("the working directory cannot be written (", OSError, after="): run in a folder that all nodes see"):
        descriptor, name = tempfile.mkstemp(prefix=".mpiddp-run-", dir=Path.cwd())
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _say(text: str) -> None:
    print(f"mpiddp run: {text}", file=sys.stderr, flush=True)
