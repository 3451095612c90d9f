"""What is counted while training: sums over samples and ranks, and what is known after an epoch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.device import array_namespace, download, is_device_array
from mpiddp.distributed import Work, all_reduce
from mpiddp.typing import Array


def count_correct(output: Tensor | Array, target: Array) -> Any:
    """Return for how many samples the class of the largest output (N, C, ...) is the target (N, ...).

    Where a sample has several targets, as a text has, it counts for the share of them that is right. On a GPU the
    number is an array of no axes, for which nobody has waited.
    """
    values = output.data if isinstance(output, Tensor) else output
    right: Any = array_namespace(values).count_nonzero(values.argmax(axis=1) == target)
    right = right if is_device_array(right) else int(right)  # to read a device is to wait for it
    return right * len(target) / target.size if target.ndim > 1 else right


class MetricSum:
    """Sums over samples, which all ranks add up in one message of a few numbers.

    Parameters
    ----------
    *names : str
        What is summed. In what is added, each is a sum over samples, not a mean.

    Examples
    --------
    >>> tally = MetricSum("loss", "correct")
    >>> tally.add(samples=3, loss=1.5, correct=2)
    >>> tally.mean("loss")
    0.5
    """

    def __init__(self, *names: str) -> None:
        self._places = {name: place for place, name in enumerate(("samples", *names))}
        self.sums = np.zeros(len(self._places))  # float64: adding up millions of samples loses nothing that is shown
        self._unread: list[tuple[int, Array]] = []

    def add(self, **amounts: float | Array) -> None:
        """Add to the sums named; numbers of a GPU, arrays of no axes, when they are `read`."""
        for name, amount in amounts.items():
            if is_device_array(amount):
                self._unread.append((self._places[name], amount))  # type: ignore[arg-type]
            else:
                self.sums[self._places[name]] += amount

    def read(self, besides: Sequence[Array] = ()) -> list[float]:
        """Add what is still on a GPU, and return the numbers of other such arrays: all by one wait and one copy."""
        arrays = [amount for _, amount in self._unread] + list(besides)
        if not arrays:
            return []
        found = download(array_namespace(arrays[0]).stack([x.astype(np.float64) for x in arrays])).tolist()
        for (place, _), amount in zip(self._unread, found, strict=False):
            self.sums[place] += amount
        numbers: list[float] = found[len(self._unread) :]
        self._unread.clear()
        return numbers

    def merge(self, other: MetricSum) -> None:
        """Add another tally of the same names."""
        self.sums += other.sums

    def all_reduce(self) -> Work:
        """Begin to add up the tallies of all ranks; when the returned Work is done, every rank has the sum."""
        self.read()
        work = all_reduce(self.sums, async_op=True)
        assert work is not None
        return work

    def __getitem__(self, name: str) -> float:
        return float(self.sums[self._places[name]])

    def mean(self, name: str) -> float:
        """Return a sum divided by the number of samples; NaN where there are none."""
        return self[name] / self["samples"] if self["samples"] else float("nan")


@dataclasses.dataclass(frozen=True)
class EpochMetrics:
    """What is known after an epoch, the same on every rank but for times."""

    epoch: int
    """From 1."""
    loss: float
    """Mean over all training samples, each as seen in its step."""
    accuracy: float | None
    """Share of the test samples that are classified rightly, 0 to 1, each counted once; None without test data."""
    samples_per_s: float
    """Training samples of all ranks per second."""
    comm_exposed: float
    """Share of the epoch's time, 0 to 1, that ranks waited for communication; the mean over ranks."""
    epoch_s: float
    """Seconds of the pass over the training data."""
    test_loss: float | None
    """Mean over all test samples."""
    test_s: float
    """Seconds of the pass over the test data."""
    lr: float
    """Learning rate of the epoch's last step."""

    def as_json(self) -> str:
        """Return one line of JSON, without line feed; what is not finite, which JSON cannot say, is null."""
        values = dataclasses.asdict(self)
        finite = {key: value if value is None or math.isfinite(value) else None for key, value in values.items()}
        return json.dumps(finite, allow_nan=False)
