"""Batches to the current device, from pinned memory, while the device computes on those before.

Imports ``device`` and NumPy. Threads that fetch batches only write to pinned memory; the thread that consumes the
batches, whose device and stream are the current ones, queues everything on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddp.device import empty, pinned, stream
from mpiddp.device.copies import up
from mpiddp.device.stream import Mark
from mpiddp.typing import Array


class Pinned:
    """A copy of a host array in pinned memory.

    Attributes
    ----------
    host : ndarray
        The copy, in ``memory``.
    memory : ndarray
        Bytes, of `pinned.take`.
    """

    def __init__(self, x: Array, memory: Array) -> None:
        self.memory = memory
        self.host: Array = memory[: x.nbytes].view(x.dtype).reshape(x.shape)
        self.host[...] = x


@dataclass(frozen=True)
class Sent:
    """A batch on its way: with arrays on the device, one of them (None where there is none), and when all are there."""

    batch: Any
    one: Array | None
    there: Mark | None


def pin(batch: Any) -> Any:
    """Return a batch with its arrays of numbers as `Pinned`; everything else stays. For any thread."""
    return mapped(_pinned, np.ndarray, batch)


def _pinned(x: Array) -> Any:
    return Pinned(x, pinned.take(x.nbytes)) if x.dtype.kind in "biufc" or x.dtype.name == "bfloat16" else x


def send(batch: Any) -> Sent:
    """Begin to copy a batch that `pin` has made."""
    targets: list[Array] = []
    sources: list[Pinned] = []

    def begin(x: Pinned) -> Array:
        target = empty(x.host.shape, x.host.dtype)
        # Until now this memory may have been a batch on which the consumer's stream still works.
        up(target, x.host, stream.after("upload", target))
        targets.append(target)
        sources.append(x)
        return target

    sending = mapped(begin, Pinned, batch)
    if not targets:
        return Sent(sending, None, None)
    there = stream.mark(stream.side("upload", targets[-1]))
    for x in sources:
        pinned.give_when(there, x.memory)
    return Sent(sending, targets[-1], there)


def receive(sent: Sent) -> Any:
    """Return a batch; what the consumer's stream does from now on waits for it, the host does not."""
    if sent.one is not None and sent.there is not None:
        stream.hold(sent.one, sent.there)
    return sent.batch


def mapped(function: Callable[[Any], Any], kind: type, batch: Any) -> Any:
    """Return a batch, nested as it may be, with ``function`` of everything that is of a kind."""
    if isinstance(batch, kind):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(function, kind, each) for each in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(mapped(function, kind, each) for each in batch)
    if isinstance(batch, dict):
        return {key: mapped(function, kind, each) for key, each in batch.items()}
    return batch


__all__ = ["Sent", "pin", "receive", "send"]
