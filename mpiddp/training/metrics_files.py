"""The files of a run's metrics: a line of JSON for each epoch, and TensorBoard's events."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .metrics import EpochMetrics
from .trainer import Trainer

_logger = logging.getLogger(__name__)


class JsonLines:
    """A file with a line of JSON for each epoch. It is begun anew, and flushed after every line."""

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
    """Return the name of a metric in TensorBoard.

    >>> tag("loss"), tag("test_loss"), tag("accuracy")
    ('loss/train', 'loss/test', 'accuracy/test')
    """
    if name.startswith("test_"):
        return f"{name.removeprefix('test_')}/test"
    return f"{name}/test" if name == "accuracy" else f"{name}/train"


class MetricsFiles:
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
