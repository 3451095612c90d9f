"""``MPIDDP_DEBUG``: INFO logs every operation. DETAIL finds calls that differ, and arrays that change too early.

With DETAIL, the ranks exchange 8-byte digests of each collective before they run it. Collectives, except coalesced
ones, work on copies, so that a change of the program's arrays before ``wait()`` shows in their checksums.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpiddp.algorithms import plan as planning
from mpiddp.algorithms.plan import Plan
from mpiddp.device import download, is_device_array
from mpiddp.errors import ArrayError
from mpiddp.faults import this_job
from mpiddp.faults.calls import mismatch
from mpiddp.mpi import recorder
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes
from mpiddp.mpi.operation import Call, Operation
from mpiddp.mpi.requests import Steps
from mpiddp.typing import Array

logger = logging.getLogger("mpiddp")

on = False
"""Whether the level is INFO or DETAIL. This is all that a call reads while debugging is off."""
detail = False
"""Whether the level is DETAIL."""

_TEXT_BYTES = 1024
_MAX_LISTED = 8

# The operations that work on copies, and whether their arrays have the same shape on all ranks.
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
    global on, detail
    on, detail = level != "OFF", level == "DETAIL"
    planning.forget()
    if on:
        logger.setLevel(logging.INFO)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())


def log(operation: Operation) -> None:
    job = this_job.current()
    logger.info("[rank %d] %s, called at %s", 0 if job is None else job.world.rank, operation, recorder.line(operation))


class Watched:
    """Arrays that the program must not change before ``wait()`` has returned."""

    def __init__(self, operation: Operation, arrays: Sequence[Array]) -> None:
        self._operation = operation
        self._arrays = list(arrays)
        self._sums = [_checksum(x) for x in arrays]

    def check(self) -> None:
        """Raise ArrayError if an array has changed."""
        for x, checksum in zip(self._arrays, self._sums, strict=True):
            if _checksum(x) != checksum:
                raise ArrayError(
                    f"an array of {self._operation.name} ({x.dtype} {x.shape}), submitted at"
                    f" {recorder.line(self._operation)}, was changed before the"
                    " operation was waited for: leave arrays of an asynchronous operation alone until wait() returns"
                )

    def renew(self) -> None:
        """Take the arrays as they are now."""
        self._sums = [_checksum(x) for x in self._arrays]


def _checksum(x: Array) -> int:
    return zlib.crc32(as_bytes(download(x)).data)


def self_comparing(call: Call) -> Call:
    """Return the call marked as compared here, so that `faults.calls` does not compare it again."""
    return replace(call, record=call.record.marked())


def traced(
    operation: Operation, link: Link, plan: Plan, args: tuple[Any, ...], outputs: Sequence[Array]
) -> tuple[Steps, Callable[[], None]]:
    """Return steps that compare the call and work on copies of the arrays, and a check for the operation's end."""
    twins: dict[int, tuple[Array, Array]] = {}
    copied = _EQUAL_SHAPES.get(plan.call.operation)
    description = _describe(operation, args, equal_shapes=bool(copied))
    if copied is not None:
        args = tuple(_twin(each, twins) for each in args)
    watched = Watched(operation, [original for original, _ in twins.values()])

    def steps() -> Steps:
        digest = np.frombuffer(
            hashlib.blake2b(f"{description} {plan.call.record}".encode(), digest_size=8).digest(), np.int64
        )
        digests = np.empty(link.size, np.int64)
        yield link.now.Iallgather(digest, digests)
        if (digests != digest).any():
            yield from _disagree(link, f"{description}{_listed(args)} at {recorder.line(operation)}", digests)
        value = yield from plan.steps(link.after(), plan.call, *args)
        watched.check()
        for output in outputs:
            if id(output) in twins and (is_device_array(output) or output.flags.writeable):
                output[...] = twins[id(output)][1]
        watched.renew()
        return value

    return steps(), watched.check


def _describe(operation: Operation, args: Sequence[Any], *, equal_shapes: bool) -> str:
    """Return the text of which ranks compare digests: the call, and a shape that has to be equal on all ranks."""
    text = operation.call.record.text(operation.number)
    x = next((x for each in args for x in (each if isinstance(each, list) else [each]) if hasattr(x, "dtype")), None)
    return f"{text}, shape {x.shape}" if equal_shapes and x is not None else text


def _listed(args: Sequence[Any]) -> str:
    """Return the sizes of the arrays in the first list. They are for the error: ranks compare a hash of them."""
    lists = [[x.size for x in each] for each in args if isinstance(each, list) and each and hasattr(each[0], "size")]
    return f", sizes {lists[0][:_MAX_LISTED]}" if lists else ""


def _twin(given: Any, twins: dict[int, tuple[Array, Array]]) -> Any:
    if isinstance(given, list) and given and hasattr(given[0], "dtype"):
        return [_twin(each, twins) for each in given]
    if not hasattr(given, "dtype"):
        return given
    if id(given) not in twins:
        twins[id(given)] = (given, given.copy())
    return twins[id(given)][1]


def _disagree(link: Link, text: str, digests: Array) -> Steps:
    mine = np.zeros(_TEXT_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
    mine[: encoded.size] = encoded
    texts = np.empty((link.size, _TEXT_BYTES), np.uint8)
    yield link.later.Iallgather(mine, texts)
    odd = int((digests != digests[0]).argmax())
    first, other = (bytes(texts[rank]).rstrip(b"\0").decode(errors="replace") for rank in (0, odd))
    raise mismatch(link, link.ranks[0], first, link.ranks[odd], other)
