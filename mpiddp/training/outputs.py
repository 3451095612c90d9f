"""Output of a run: metrics as JSON lines and TensorBoard events, the console, a log for each rank, the lock."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tqdm import tqdm

from .config import Config
from .metrics import EpochMetrics
from .trainer import Trainer

_logger = logging.getLogger(__name__)


class JsonLines:
    """Begun anew, flushed after every line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1)

    def write(self, metrics: EpochMetrics) -> None:
        self._file.write(metrics.as_json() + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardEvents:
    """Event files of TensorBoard, by its package alone; ImportError without it.

    Every start of a run adds a file, shown as one curve. ``history``, the epochs before a checkpoint, is written if
    the folder has no events; TensorBoard hides an earlier start's later epochs.
    """

    def __init__(self, folder: Path, history: Sequence[EpochMetrics] = ()) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        continued = any(folder.glob("events.out.tfevents.*"))
        self._writer: Any = writer.EventFileWriter(str(folder))
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(len(history) + 1 if continued else 1, session_log=start)
        for metrics in () if continued else history:
            self.write(metrics)

    def write(self, metrics: EpochMetrics) -> None:
        """At the epoch's number."""
        numbers = {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}
        values = [
            self._summaries.Summary.Value(tag=tag(name), simple_value=value)
            for name, value in numbers.items()
            if name != "epoch"
        ]
        self._add(metrics.epoch, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **what))


def tag(name: str) -> str:
    """Return TensorBoard's name of a number.

    >>> tag("loss"), tag("test_loss"), tag("accuracy")
    ('loss/train', 'loss/test', 'accuracy/test')
    """
    if name.startswith("test_"):
        return f"{name.removeprefix('test_')}/test"
    return f"{name}/test" if name == "accuracy" else f"{name}/train"


class Outputs:
    """All files of metrics of a run, written on rank 0 from ``history`` on; OSError for unwritable files.

    ``metrics`` is a file of JSON lines; ``output`` gets ``metrics.jsonl`` and, with tensorboard, ``tensorboard/``.
    """

    def __init__(self, metrics: Path | None, output: Path | None, history: Sequence[EpochMetrics] = ()) -> None:
        files: list[JsonLines | TensorBoardEvents] = [JsonLines(metrics)] if metrics is not None else []
        if output is not None:
            files.append(JsonLines(output / "metrics.jsonl"))
        for file in files:
            for each in history:
                file.write(each)
        self._files = files
        self._written = len(history)
        if output is not None:
            with contextlib.suppress(ImportError):
                self._files.append(TensorBoardEvents(output / "tensorboard", history))

    def epoch_end(self, trainer: Trainer) -> None:
        """Write the new epochs; a full disk does not stop the training."""
        for metrics in trainer.history[self._written :]:
            for file in self._files:
                try:
                    file.write(metrics)
                except OSError as error:
                    _logger.warning("epoch %d is missing in a %s (%s)", metrics.epoch, type(file).__name__, error)
        self._written = len(trainer.history)

    def close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()


def say(text: str) -> None:
    """Print; a broken pipe or a full disk must not end days of training."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def configuration_lines(config: Config, ranks: int, nodes: int) -> str:
    lines = [f"training on {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}:"]
    for table, values in config.tables().items():
        said = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        lines.append(f"  {table + ':':14} {said}")
    return "\n".join(lines)


def epoch_line(metrics: EpochMetrics, epochs: int) -> str:
    width = len(str(epochs))
    accuracy = "" if metrics.accuracy is None else f"  accuracy {metrics.accuracy:.4f}"
    return (
        f"epoch {metrics.epoch:{width}d}/{epochs}  loss {metrics.loss:.4f}{accuracy}"
        f"  {metrics.samples_per_s:7,.0f} samples/s  {metrics.epoch_s:5.2f} s  exposed comm {metrics.comm_exposed:5.1%}"
        f"  lr {metrics.lr:g}"
    )


class Console:
    """Prints on rank 0: one line per epoch, and a progress bar on a terminal."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._bar: tqdm[None] | None = None
        self._skipped = 0

    def epoch_begin(self, trainer: Trainer) -> None:
        self._skipped = trainer.skipped
        # Open MPI gives every rank a terminal as stdout, even if its own output goes to a file.
        if sys.stderr.isatty():
            steps = -(-len(trainer.train_loader) // trainer.accumulate)
            self._bar = tqdm(total=steps, desc=f"epoch {trainer.epoch + 1}", leave=False)

    def step_end(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.update()

    def epoch_end(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        say(epoch_line(trainer.history[-1], self._epochs))
        if trainer.skipped > self._skipped:
            left_out = trainer.skipped - self._skipped
            _logger.warning("%d steps of epoch %d left out: loss or gradients were not finite", left_out, trainer.epoch)


class RankLog:
    """Prints warnings and logged errors with the rank in front; all from INFO on goes to ``folder``."""

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
            # stderr gets it from the library
            _logger.info("ended by an exception", exc_info=error)
        root = logging.getLogger()
        root.setLevel(self._before)
        logging.captureWarnings(False)
        for handler in self._handlers:
            root.removeHandler(handler)
            with contextlib.suppress(OSError):  # lines that there was no space for
                handler.close()

    def epoch_begin(self, trainer: Trainer) -> None:
        self._waited_s = trainer.comm_exposed_s

    def epoch_end(self, trainer: Trainer) -> None:
        waited_s, metrics = trainer.comm_exposed_s - self._waited_s, trainer.history[-1]
        _logger.info(
            "epoch %d ended after step %d: %.2f s, of which this rank waited %.2f s for others; loss %.4f",
            *(metrics.epoch, trainer.step, metrics.epoch_s, waited_s, metrics.loss),
        )


class _LogFile(logging.FileHandler):
    """Drops lines that the disk has no space for, without `logging`'s traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (its name in logging)
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.lowered = record.levelname.lower()
        return super().format(record)


_PATIENCE_S = 5.0
"""Of ranks, after a killed launcher."""
_LOOK_S = 0.1
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class RunLock:
    """Exclusive right to write in a run's folder, by ``flock``, until `release` or the process's end.

    Two runs would remove each other's unfinished checkpoints and mix their metrics. A file system without locks has
    none, silently. The file ``lock`` names its owner, and so does BlockingIOError.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (folder / "lock").open("a+")
        if not self._taken():
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise BlockingIOError(
                f"{folder} is in use by another run, {owner}: wait for its end, or give another --output"
            )
        self._file.truncate(0)
        job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}{job}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()

    def _taken(self) -> bool:
        """Return False if the file remains locked."""
        given_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _TAKEN:
                    return True
                if time.monotonic() > given_up_at:
                    return False
                time.sleep(_LOOK_S)
            else:
                return True
