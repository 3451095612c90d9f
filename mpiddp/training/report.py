"""What a person sees of a run: one line per epoch, and a progress bar on a terminal. Rank 0 only."""

from __future__ import annotations

import contextlib
import logging
import sys

from tqdm import tqdm

from .config import Config
from .metrics import EpochMetrics
from .trainer import Trainer

_logger = logging.getLogger(__name__)


def say(text: str) -> None:
    """Print, if anybody reads it: days of training do not end because a pipe is broken, or a log's disk full."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def configuration_lines(config: Config, ranks: int, nodes: int) -> str:
    """Return the configuration, a line for each of its tables."""
    lines = [f"training on {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}:"]
    for table, values in config.tables().items():
        said = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        lines.append(f"  {table + ':':14} {said}")
    return "\n".join(lines)


def epoch_line(metrics: EpochMetrics, epochs: int) -> str:
    """Return an epoch in one line."""
    width = len(str(epochs))
    accuracy = "" if metrics.accuracy is None else f"  accuracy {metrics.accuracy:.4f}"
    return (
        f"epoch {metrics.epoch:{width}d}/{epochs}  loss {metrics.loss:.4f}{accuracy}"
        f"  {metrics.samples_per_s:7,.0f} samples/s  {metrics.epoch_s:5.2f} s  exposed comm {metrics.comm_exposed:5.1%}"
        f"  lr {metrics.lr:g}"
    )


class Console:
    """Callbacks that print: add them to a trainer on rank 0.

    Parameters
    ----------
    epochs : int
        How many there will be.
    """

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._bar: tqdm[None] | None = None
        self._skipped = 0

    def epoch_begin(self, trainer: Trainer) -> None:
        """Show a bar, on a terminal."""
        self._skipped = trainer.skipped
        # Not stdout: Open MPI gives every rank a terminal there, also where its own output goes to a file.
        if sys.stderr.isatty():
            steps = -(-len(trainer.train_loader) // trainer.accumulate)
            self._bar = tqdm(total=steps, desc=f"epoch {trainer.epoch + 1}", leave=False)

    def step_end(self, trainer: Trainer) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update()

    def epoch_end(self, trainer: Trainer) -> None:
        """Print the epoch's line in place of the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        say(epoch_line(trainer.history[-1], self._epochs))
        if trainer.skipped > self._skipped:
            left_out = trainer.skipped - self._skipped
            _logger.warning("%d steps of epoch %d left out: loss or gradients were not finite", left_out, trainer.epoch)
