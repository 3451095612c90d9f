"""What the `Trainer` asks of a model, and the naive way of giving it. Imports ``parallel``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from mpiddp.nn import Module
from mpiddp.parallel import average_gradients
from mpiddp.parallel.naive import current_share, sample_share


class AveragedModel(Protocol):
    """A model whose gradients are averages over all ranks; `DistributedDataParallel` is one."""

    module: Module

    def __call__(self, *inputs: Any) -> Any:
        """Run the model."""

    def weighted(self, n_samples: float, total: float | None = None) -> AbstractContextManager[None]:
        """Wrap forward and backward on ``n_samples`` samples of ``total``: after it the gradients are averages."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Wrap forward and backward whose gradients are added to what there is, and not averaged yet."""

    def skip_forward(self) -> None:
        """Take part in what a forward of the other ranks sends, on a rank that has no inputs for one."""

    def bucket_order(self) -> list[int] | None:
        """Return what decides how gradients share messages, or None where nothing does yet."""

    def install_bucket_order(self, order: Sequence[int]) -> None:
        """Let gradients share messages as they did where `bucket_order` returned ``order``."""

    @property
    def exposed_s(self) -> float:
        """Seconds for which this rank has waited for gradients, in all."""


class NaiveAveraging:
    """A model whose gradients are averaged after backward, one all-reduce for each parameter.

    Parameters
    ----------
    module : Module
        The model, with equal values on all ranks.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.exposed_s = 0.0
        self._averages = True

    def __call__(self, *inputs: Any) -> Any:
        """Run the model."""
        return self.module(*inputs)

    @contextmanager
    def weighted(self, n_samples: float, total: float | None = None) -> Iterator[None]:
        """Average the gradients at the end of the block, unless in `no_sync`; see `AveragedModel`."""
        share = sample_share(n_samples, total)
        token = current_share.set(share)
        try:
            yield
        finally:
            current_share.reset(token)
        if self._averages:
            began = time.perf_counter()
            average_gradients(self.module, weight=share, total=1.0)
            self.exposed_s += time.perf_counter() - began

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of the block this rank's own."""
        outer, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = outer

    def skip_forward(self) -> None:
        """Do nothing: forward sends nothing here."""

    def bucket_order(self) -> None:
        """Return None: each gradient is a message of its own."""

    def install_bucket_order(self, order: Sequence[int]) -> None:
        """Take no notice: there are no buckets."""
