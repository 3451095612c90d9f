"""``RankLog``: what a rank's `logging` says, with the rank in front; and a file of its own for each rank.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from .trainer import Trainer

_logger = logging.getLogger(__name__)


class RankLog:
    """While it is entered, warnings, and errors that are logged, go to stderr with the rank in front.

    With a folder, every rank also writes a file there: everything from level INFO on, a line for every epoch with what
    this rank alone knows, and the traceback that ends it.

    Parameters
    ----------
    rank, size : int
        This rank, and how many there are.
    folder : Path, optional
        Where ``rank-3.log`` is; made where it is missing. Lines are added to a file that is there.

    Raises
    ------
    OSError
        If the file cannot be opened.
    """

    def __init__(self, rank: int, size: int, folder: Path | None = None) -> None:
        self._prefix = f"[rank {rank}/{size}]"
        self._waited_s = 0.0
        on_terminal = logging.StreamHandler(sys.stderr)
        on_terminal.setLevel(logging.WARNING)
        on_terminal.setFormatter(_RankFormatter(f"{self._prefix} %(lowered)s: %(message)s"))
        self._handlers: list[logging.Handler] = [on_terminal]
        self._level = logging.WARNING
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            file = _LogFile(folder / f"rank-{rank}.log")
            file.setFormatter(_RankFormatter(f"%(asctime)s {self._prefix} %(lowered)s: %(message)s"))
            self._handlers.append(file)
            self._level = logging.INFO

    def __enter__(self) -> Self:
        root = logging.getLogger()
        self._before = root.level
        root.setLevel(min(self._level, self._before))
        for handler in self._handlers:
            root.addHandler(handler)
        logging.captureWarnings(True)
        _logger.info("process %d on %s", os.getpid(), socket.gethostname())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # The library prints it on stderr; the file has to know, too.
            _logger.info("ended by an exception", exc_info=error)
        root = logging.getLogger()
        root.setLevel(self._before)
        logging.captureWarnings(False)
        for handler in self._handlers:
            root.removeHandler(handler)
            with contextlib.suppress(OSError):  # of lines that there was no space for
                handler.close()

    def epoch_begin(self, trainer: Trainer) -> None:
        """Remember how long the trainer has waited so far: a callback for a `Trainer`."""
        self._waited_s = trainer.comm_exposed_s

    def epoch_end(self, trainer: Trainer) -> None:
        """Log what this rank knows of the epoch that has ended: a callback for a `Trainer`."""
        waited_s, metrics = trainer.comm_exposed_s - self._waited_s, trainer.history[-1]
        _logger.info(
            "epoch %d ended after step %d: %.2f s, of which this rank waited %.2f s for others; loss %.4f",
            *(metrics.epoch, trainer.step, metrics.epoch_s, waited_s, metrics.loss),
        )


class _LogFile(logging.FileHandler):
    """Loses lines for which the disk has no space; `logging` would print a traceback for each, on every rank."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (its name in logging)
        """Take no notice of what the system refuses."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _RankFormatter(logging.Formatter):
    """Knows levels in small letters too, as ``lowered``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text."""
        record.lowered = record.levelname.lower()
        return super().format(record)
