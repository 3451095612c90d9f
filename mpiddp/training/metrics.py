"""Metrics: loss and correct answers, summed over samples and ranks, and the record of an epoch."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.device import array_namespace, download, is_device_array
from mpiddp.distributed import Work, all_reduce
from mpiddp.typing import Array


def count_correct(output: Tensor | Array, target: Array) -> Any:
    """Count the samples whose target (N, ...) is the class of the largest output (N, C, ...).

    A sample with several targets, as in text, counts as the share of its targets that are right. For arrays on a GPU
    the result is an array without axes, and the call does not wait for the GPU.
    """
    values = output.data if isinstance(output, Tensor) else output
    right: Any = array_namespace(values).count_nonzero(values.argmax(axis=1) == target)
    right = right if is_device_array(right) else int(right)  # int() of a device array would wait for the device
    return right * len(target) / target.size if target.ndim > 1 else right


class MetricSum:
    """Sums of metrics over samples. One all_reduce of the short array ``sums`` adds those of all ranks.

    With a row for each virtual rank the sums have the same bits on any number of ranks: only one rank adds to a row,
    and the rows are added when a sum is read.

    >>> tally = MetricSum()
    >>> tally.add(samples=3, loss=1.5, correct=2)
    >>> tally.mean("loss")
    0.5
    """

    _places: ClassVar = {"samples": 0, "loss": 1, "correct": 2, "stop": 3}
    """Index of each sum in a row. Checkpoints hold the sums in this order; ``stop`` counts ranks asked to stop."""

    def __init__(self, rows: int = 1) -> None:
        self.sums = np.zeros(rows * len(self._places))  # float64 is precise enough for sums over millions of samples
        self._unread: list[tuple[int, Array]] = []

    def add(self, row: int = 0, /, **amounts: float | Array) -> None:
        """Add amounts to the sums of a row. Amounts on a GPU are only collected until `read` adds them."""
        for name, amount in amounts.items():
            place = self._places[name] + row * len(self._places)
            if is_device_array(amount):
                self._unread.append((place, amount))  # type: ignore[arg-type]
            else:
                self.sums[place] += amount

    def read(self, besides: Sequence[Array] = ()) -> list[float]:
        """Add the amounts that `add` collected on the GPU, and return the numbers in ``besides``, also on the GPU.

        All numbers are stacked, so that one copy, which waits for the GPU, fetches them.
        """
        arrays = [amount for _, amount in self._unread] + list(besides)
        if not arrays:
            return []
        found = download(array_namespace(arrays[0]).stack([x.astype(np.float64) for x in arrays])).tolist()
        for (place, _), amount in zip(self._unread, found, strict=False):
            self.sums[place] += amount
        numbers: list[float] = found[len(self._unread) :]
        self._unread.clear()
        return numbers

    def merge(self, other: "MetricSum") -> None:
        """Add the sums of another `MetricSum`, which may have more rows."""
        for name, place in self._places.items():
            self.sums[place] += other[name]

    def all_reduce(self) -> Work:
        self.read()
        return all_reduce(self.sums, async_op=True)  # type: ignore[return-value] # every rank is in the group

    def __getitem__(self, name: str) -> float:
        return float(self.sums[self._places[name] :: len(self._places)].sum())

    def mean(self, name: str) -> float:
        """Return the mean of a metric over the samples; NaN if there are no samples."""
        return self[name] / self["samples"] if self["samples"] else float("nan")


@dataclasses.dataclass(frozen=True)
class EpochMetrics:
    """Metrics of an epoch. Each rank has its own times and ``samples_per_s``; all else is the same on every rank."""

    epoch: int
    """Number of the epoch, from 1."""
    loss: float
    """Mean loss over the training samples of all steps that were not skipped, each computed in its step."""
    accuracy: float
    """Share of correctly classified test samples."""
    samples_per_s: float
    """Training samples of all ranks per second."""
    comm_exposed: float
    """Share of the training time in which a rank waits for communication; mean over ranks."""
    epoch_s: float
    """Seconds of the pass over the training data."""
    test_loss: float
    """Mean loss over all test samples."""
    test_s: float
    """Seconds of the pass over the test data."""
    lr: float
    """Learning rate of the epoch's last step."""

    def as_json(self) -> str:
        """Return one line of JSON without a line feed. Values that are not finite become null."""
        values = dataclasses.asdict(self)
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        return json.dumps(finite, allow_nan=False)
