"""Metrics: sums over samples and ranks, and the record of an epoch."""

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

    Of several targets, as in text, the right share counts. A GPU's number is an array without axes, not waited for.
    """
    values = output.data if isinstance(output, Tensor) else output
    right: Any = array_namespace(values).count_nonzero(values.argmax(axis=1) == target)
    right = right if is_device_array(right) else int(right)  # to read a device is to wait for it
    return right * len(target) / target.size if target.ndim > 1 else right


class MetricSum:
    """Sums (not means) over samples, and over ranks by one short message.

    With a row for each virtual rank the sums have the same bits on any number of ranks: one rank alone adds to a row,
    and rows are added at the end.

    >>> tally = MetricSum()
    >>> tally.add(samples=3, loss=1.5, correct=2)
    >>> tally.mean("loss")
    0.5
    """

    _places: ClassVar = {"samples": 0, "loss": 1, "correct": 2, "stop": 3}
    """Checkpoints hold the sums in this order; ``stop`` counts the ranks that are asked to stop."""

    def __init__(self, rows: int = 1) -> None:
        self.sums = np.zeros(rows * len(self._places))  # float64: millions of samples lose nothing that is shown
        self._unread: list[tuple[int, Array]] = []

    def add(self, row: int = 0, /, **amounts: float | Array) -> None:
        """Add to sums. Numbers on a GPU, which are arrays without axes, are only kept; `read` adds them."""
        for name, amount in amounts.items():
            place = self._places[name] + row * len(self._places)
            if is_device_array(amount):
                self._unread.append((place, amount))  # type: ignore[arg-type]
            else:
                self.sums[place] += amount

    def read(self, besides: Sequence[Array] = ()) -> list[float]:
        """Add the kept numbers of a GPU, and return those of ``besides``, by one wait and one copy for all."""
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
        """Add the sums of another one, which may have more rows."""
        for name, place in self._places.items():
            self.sums[place] += other[name]

    def all_reduce(self) -> Work:
        self.read()
        return all_reduce(self.sums, async_op=True)  # type: ignore[return-value] # every rank is in the group

    def __getitem__(self, name: str) -> float:
        return float(self.sums[self._places[name] :: len(self._places)].sum())

    def mean(self, name: str) -> float:
        """Return the mean over samples; NaN without any."""
        return self[name] / self["samples"] if self["samples"] else float("nan")


@dataclasses.dataclass(frozen=True)
class EpochMetrics:
    """Metrics of an epoch, the same on every rank except for times."""

    epoch: int
    """Its number, from 1."""
    loss: float
    """Mean over all training samples, each at its step."""
    accuracy: float
    """Share of correctly classified test samples."""
    samples_per_s: float
    """Training samples of all ranks."""
    comm_exposed: float
    """Share of time in waits for communication; mean over ranks."""
    epoch_s: float
    """The pass over the training data."""
    test_loss: float
    """Mean over all test samples."""
    test_s: float
    """The pass over the test data."""
    lr: float
    """The rate in the epoch's last step."""

    def as_json(self) -> str:
        """Return one line of JSON, without line feed; values that are not finite are null."""
        values = dataclasses.asdict(self)
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        return json.dumps(finite, allow_nan=False)
