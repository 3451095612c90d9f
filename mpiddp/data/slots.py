"""Samples of a stream: the text of their fields, memory for them, and their reception.

Each slot of the memory holds one sample. A slot has a persistent receive request of MPI, which is made once and started
for each sample.

If a message is longer than its slot and comes by rendezvous, Open MPI (4.1.8 and 5.0.11) writes all of it before it
reports the error. Therefore there is spare memory behind the last slot, and `Slots.overrun` says that samples may be
wrong.
"""

from __future__ import annotations

import contextlib
import re
from itertools import islice, repeat
from typing import Any

import numpy as np

from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.library import facts
from mpiddp.mpi.world import library_name

_FIELD = re.compile(r"\s*(\w+)\s+(bool|[a-z]+\d+)((?:\s+\d+)*)\s*")
TOO_LONG = -1
"""The size that `Slots.arrived` returns for a sample that was longer than a slot."""


_LINGER = 30
"""Number of polls for another sample before `Slots.arrived` returns the samples that it has.

Returning each short sample by itself would take longer than receiving it.
"""
_BEHIND_BYTES = 1 << 24
"""Size of the spare memory behind the last slot.

Only a message that is too long is written to it. Until then it takes addresses but no physical memory.
"""


def parsed(text: str) -> np.dtype[Any]:
    fields: list[tuple[str, str, tuple[int, ...]]] = []
    for part in text.strip().rstrip(";").split(";"):
        match = _FIELD.fullmatch(part)
        if match is None or match[2] not in np.sctypeDict:
            raise ValueError(
                "a field is a name, a dtype of NumPy and dimensions, as in 'x float32 64 64; step int64' (send numbers "
                f"that NumPy does not have as integers of their size); got {part!r}"
            )
        fields.append((match[1], match[2], tuple(map(int, match[3].split()))))
    return np.dtype(fields)


def text_of(dtype: np.dtype[Any]) -> str:
    """Return the text by which sources describe a structured dtype.

    Examples
    --------
    >>> text_of(np.dtype([("x", "f4", (2, 3)), ("step", "i8")]))
    'x float32 2 3; step int64'
    """
    of = [(name, dtype[name].base.name, *dtype[name].shape) for name in dtype.names or ()]
    return "; ".join(" ".join(map(str, each)) for each in of)


class Slots:
    """Memory of ``count`` slots for samples of ``dtype``, which come from any rank of ``comm`` with ``tag``.

    MPI may receive into ``window`` of the slots at a time.
    """

    overrun = False
    """True if a message that was too long may have been written over samples, or over other memory."""

    def __init__(self, comm: Any, tag: int, dtype: np.dtype[Any], count: int, window: int) -> None:
        size = dtype.itemsize
        library = facts(library_name())
        self._overruns, self._one_by_one = library.overruns_receives, library.starts_fast_one_by_one
        memory = np.empty(count * size + _BEHIND_BYTES * self._overruns, np.uint8)
        self.bytes = memory[: count * size].reshape(count, size)
        self.samples = self.bytes.view(dtype)[:, 0]
        self.free = list(range(count))[::-1]
        self._posted: list[int] = []
        """The slots that MPI may receive into, in the order in which it fills them."""
        self._sources: list[int] = []
        """The sources of the samples that have arrived, in the first slots of ``_posted``.

        It is an attribute because a signal's handler may raise before `arrived` returns the samples; its next call
        returns them.
        """
        self._last = size
        """Size of the sample that arrived last."""
        self._comm, self._tag, self._window = comm, tag, window
        self._requests = list(map(self._request, range(count)))
        self._tests = [each.Test for each in self._requests]
        self._starts = [each.Start for each in self._requests]
        self._status = MPI.Status()

    def _request(self, slot: int) -> MPI.Prequest:
        return self._comm.Recv_init([self.bytes[slot], MPI.BYTE], MPI.ANY_SOURCE, self._tag)  # type: ignore[no-any-return]

    def post(self) -> None:
        """Start to receive samples into free slots, as many as the window allows."""
        count = min(len(self.free), self._window - len(self._posted))
        if count > 0:
            slots, start = self.free[-count:], MPI.Prequest.Startall
            requests = [self._requests[slot] for slot in slots]
            # Python runs a signal's handler, which may raise, after calls. So no call stands between the first change
            # of the lists and the start.
            del self.free[-count:]
            self._posted += slots
            start(requests)

    def arrived(self) -> tuple[list[int], list[int], int]:
        """Return slots and sources of samples that have arrived, and the size of the last sample.

        A sample of another size than a slot ends the list. If it was longer than a slot, the size is `TOO_LONG`.
        """
        tests, starts, posted = self._tests, self._starts, self._posted
        status, size, sources = self._status, self.bytes.shape[1], self._sources
        free = self.free if self._one_by_one else []
        source_of, bytes_of = status.Get_source, status.Get_count
        most = self._window if self._last == size else 0
        try:
            for slot in islice(posted, len(sources), len(sources) + most):
                test = tests[slot]
                if not (test(status) or (sources and any(map(test, repeat(status, _LINGER))))):
                    break
                last = bytes_of()
                if last != size:
                    self._last = last
                sources.append(source_of())
                if last != size:
                    break
                if free:  # without a call before the start, as in `post`
                    slot = free[-1]
                    del free[-1]
                    posted += (slot,)
                    starts[slot]()
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            self._renew(posted[len(sources)])
            self.overrun = self._overruns
            sources.append(source_of())
            self._last = TOO_LONG
        except BaseException:  # a signal's handler has raised
            again = MPI.Status()
            if len(sources) < len(posted) and tests[posted[len(sources)]](again):
                # The sample has arrived just now, or the test before the signal has already completed the request.
                told = again if again.Get_source() >= 0 else status
                self._last = told.Get_count()
                sources.append(told.Get_source())
            raise
        last, count = self._last, len(sources)
        self._last, self._sources = size, []
        slots = posted[:count]
        del posted[:count]
        return slots, sources, last

    def _renew(self, slot: int) -> None:
        """Make a new request for a slot whose request ended with an error. Open MPI 4 frees such a request."""
        with contextlib.suppress(MPI.Exception):
            self._requests[slot].Free()
        self._requests[slot] = request = self._request(slot)
        self._tests[slot], self._starts[slot] = request.Test, request.Start

    def close(self) -> None:
        """Stop receiving. The samples that have arrived stay in memory."""
        for slot in self._posted[len(self._sources) :]:
            with contextlib.suppress(MPI.Exception):  # a message from a rank that is no source may be too long
                self._requests[slot].Cancel()
                self._requests[slot].Wait()
        self.free += self._posted
        self._posted.clear()
        for request in self._requests:
            with contextlib.suppress(MPI.Exception):  # Open MPI 4 has freed requests that ended with an error
                request.Free()
        self._requests, self._tests, self._starts, self._sources = [], [], [], []
