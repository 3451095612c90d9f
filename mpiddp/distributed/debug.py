"""``MPIDDP_DEBUG``: logs every operation (INFO), and finds ranks that disagree and buffers touched too early (DETAIL).

With DETAIL every collective is preceded by an all-gather of 8 bytes: a digest of operation, sequence number, dtype,
shape, root and reduction. Where digests differ, all ranks exchange what they call and raise the same `MismatchError`.
Arrays of an asynchronous operation, unless it is a coalesced one, are copied, and the operation works on the copies: so
whatever the program does to its arrays before ``wait()`` shows in their checksums, and is an error that names the line
of the submission. Both cost time and memory, and serve to find a fault.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpiddp.algorithms import plan
from mpiddp.device import is_device_array
from mpiddp.errors import ArrayError, MismatchError
from mpiddp.faults.calls import Call
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.operation import Operation
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Steps
from mpiddp.typing import Array

logger = logging.getLogger("mpiddp")

on = False
"""Whether operations are logged: the one attribute that is looked at when nothing is wanted."""
detail = False
"""Whether they are compared over the ranks, and buffers watched."""

_PACKAGE = str(Path(__file__).parents[1])
_TEXT_BYTES = 1024

# Operations whose arrays are copied, and whether all ranks give equal shapes.
_EQUAL_SHAPES = {
    "broadcast": True,
    "all_reduce": True,
    "reduce": True,
    "all_gather": False,
    "all_gather_single": True,
    "gather": False,
    "scatter": False,
    "reduce_scatter": True,
    "reduce_scatter_single": True,
    "all_to_all": False,
    "all_to_all_single": False,
}


def configure(level: str) -> None:
    """Set the level: OFF, INFO or DETAIL."""
    global on, detail
    on, detail = level != "OFF", level == "DETAIL"
    if on:
        logger.setLevel(logging.INFO)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())


def caller() -> str:
    """Return file and line of the program's call into the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def log(what: Operation) -> None:
    """Log that the program has called an operation."""
    logger.info("[rank %d] %s, called at %s", what.link.world.rank, what, caller())


class Watched:
    """Arrays of an operation that the program must leave alone until it has waited.

    Parameters
    ----------
    name : str
        The operation.
    arrays : sequence of arrays
        The arrays.
    """

    def __init__(self, name: str, arrays: Sequence[Array]) -> None:
        self._name, self._line = name, caller()
        self._arrays = list(arrays)
        self._sums = [_checksum(x) for x in arrays]

    def check(self) -> None:
        """Raise `ArrayError` if an array has changed."""
        for x, checksum in zip(self._arrays, self._sums, strict=True):
            if _checksum(x) != checksum:
                raise ArrayError(
                    f"an array of {self._name} ({x.dtype} {x.shape}), submitted at {self._line}, was changed before the"
                    " operation was waited for: leave arrays of an asynchronous operation alone until wait() returns"
                )

    def renew(self) -> None:
        """Take the arrays as they are now."""
        self._sums = [_checksum(x) for x in self._arrays]


def _checksum(x: Array) -> int:
    host = x.get() if is_device_array(x) else x  # type: ignore[attr-defined]
    return zlib.crc32(as_bytes(host).data)


class Observed:
    """An algorithm whose call is compared over the group, and whose arrays are watched.

    Parameters
    ----------
    name : str
        The operation.
    algorithm : function
        Its steps.
    outputs : sequence of arrays
        The arrays that hold the result.
    kind, count, root : int
        What the board, which leaves it to this, would compare.
    """

    def __init__(
        self, name: str, algorithm: Callable[..., Steps], outputs: Sequence[Array], kind: int, count: int, root: int
    ) -> None:
        self._name, self._algorithm, self._outputs = name, algorithm, outputs
        self._call = kind, count, root
        self._equal_shapes = _EQUAL_SHAPES.get(plan.operation_of(name))
        self._line = caller()
        self.watched: Watched | None = None

    def __call__(self, link: Link, *args: Any) -> Steps:
        """Return the steps: compare, do it on copies, compare checksums, copy the results back."""
        description = self._describe(link, args)
        told = f"{description} {self._call}"
        digest = np.frombuffer(hashlib.blake2b(told.encode(), digest_size=8).digest(), np.int64)
        digests = np.empty(link.size, np.int64)
        twins: dict[int, tuple[Array, Array]] = {}
        if self._equal_shapes is not None:
            args = tuple(_twin(each, twins) for each in args)
        originals = [original for original, _ in twins.values()]
        self.watched = watched = Watched(self._name, originals)
        yield link.now.Iallgather(digest, digests)
        if (digests != digest).any():
            yield from _disagree(link, f"{description} at {self._line}", digests)
        value = yield from self._algorithm(link.after(), *args)
        watched.check()
        for output in self._outputs:
            if id(output) in twins and (is_device_array(output) or output.flags.writeable):
                output[...] = twins[id(output)][1]
        watched.renew()
        return value

    def _describe(self, link: Link, args: Sequence[Any]) -> str:
        """Return what all ranks of the group must call alike."""
        if not self._equal_shapes:
            return str(Call(link.sequence, *self._call))
        x = next(x for each in args for x in (each if isinstance(each, list) else [each]) if hasattr(x, "dtype"))
        text = f"{self._name} #{link.sequence} of {x.dtype} {x.shape}" + (" on a device" if is_device_array(x) else "")
        names = list(inspect.signature(self._algorithm).parameters)[1:]
        for name, value in zip(names, args, strict=False):
            if name == "root":
                text += f" with rank {link.ranks[value]} as root"
            elif isinstance(value, ReduceOp):
                text += f" by {value.name}"  # the factor of PREMUL_SUM is each rank's own
        return text


def _twin(given: Any, twins: dict[int, tuple[Array, Array]]) -> Any:
    """Return a copy of an array, or of a list of arrays, and keep both."""
    if isinstance(given, list) and given and hasattr(given[0], "dtype"):
        return [_twin(each, twins) for each in given]
    if not hasattr(given, "dtype"):
        return given
    if id(given) not in twins:
        twins[id(given)] = (given, given.copy())
    return twins[id(given)][1]


def _disagree(link: Link, text: str, digests: Array) -> Steps:
    """Exchange what the ranks call, and raise on every rank."""
    mine = np.zeros(_TEXT_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
    mine[: encoded.size] = encoded
    texts = np.empty((link.size, _TEXT_BYTES), np.uint8)
    yield link.later.Iallgather(mine, texts)
    odd = int((digests != digests[0]).argmax())
    first, other = (bytes(texts[rank]).rstrip(b"\0").decode(errors="replace") for rank in (0, odd))
    raise MismatchError(
        f"the ranks of {link} disagree: rank {link.ranks[0]} called {first}, rank {link.ranks[odd]} called {other};"
        " all ranks must call the same operations with the same shapes, dtypes, roots and reductions, in the same order"
    )
