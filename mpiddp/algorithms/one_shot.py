"""One shot: ranks write their short arrays to eager buffers, and each that gets a result makes it from these by itself.

Longer arrays go in pieces, with a shot for each piece. `OneShot.run` makes a call at once, `OneShot.steps` when the
call is at the head of the queue.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np

from mpiddp.errors import DistError
from mpiddp.faults.calls import NO_ROOT, BlockError
from mpiddp.faults.monitor import GroupMonitor
from mpiddp.mpi import recorder, requests
from mpiddp.mpi.lazy import MPI
from mpiddp.mpi.link import Link
from mpiddp.mpi.message import as_bytes, spans_of
from mpiddp.mpi.operation import Call, Operation
from mpiddp.mpi.recorder import append, caller
from mpiddp.mpi.reduction import ReduceOp, is_half
from mpiddp.mpi.requests import READY, Awaited, Failed, Steps
from mpiddp.mpi.work import Ended, Work
from mpiddp.shm.eager import LOOKS, EagerBuffers, Round, SpinWait
from mpiddp.typing import Array

from .local_reduce import accumulated_in, finish, premultiply, reduce_rows

Cut = Callable[[Array], Array]
_ELEMENT_BYTES = 1 << 16
"""Arrays of larger elements are cut as bytes, because such an element may be larger than a buffer."""
_BYTES_PER_LOOK = 1 << 9
_MOST_LOOKS = 1 << 12
_abandoned: list[tuple[Sequence[Any], Awaited | None, Steps]] = []
"""Arguments, events and steps of failed calls. They are kept, because MPI and other ranks may still write to their
memory."""


ENOUGH = Failed(DistError("nobody waits for this"))
"""`Shot.end` returns this if the call is complete, so that the shots after it are not made."""


@dataclass(slots=True, eq=False)
class Shot:
    rounds: list[Round]
    shown: Callable[[Any], Array | None] | None
    """The function that returns the piece of the input to write to the buffer. It may also write to the buffer by
    itself, and return None."""
    result: Cut
    """The function that returns the piece of the output that gets the result."""
    write: Callable[[Array, Array], object] | None
    """The function that writes a piece to the buffer; None if the piece can be copied as bytes, because it has no gaps
    and is not to be changed."""
    awaited: SpinWait | None
    """The arrival of the ranks that this one waits for; None if it waits for none."""
    end: Callable[[Round, Any], Awaited | None] | None
    """The function that finishes the shot. If it returns an event, the call ends with that event, and the shots after
    this one are left out, on all ranks alike. They are made if it returns None, and if there is no function."""


class OneShot:
    """A collective call, made in one shot or in several.

    Its output and input have the positions ``places`` among its arguments.
    """

    def __init__(
        self,
        link: Link,
        call: Call,
        shots: Iterable[Shot],
        places: tuple[int, int] = (0, 0),
        apart: Callable[[Any, Any], Any] | None = None,
        size_bytes: int = 0,
    ) -> None:
        self._link, self._eager, self._monitor, self._call = link, link[EagerBuffers], link[GroupMonitor], call
        self._record = call.record.pack(0)[8:]  # the record's bytes without the sequence number
        self._output, self._input = places
        self._apart = apart
        """The function that returns the input, or a copy if it shares memory with the output."""
        self.shots = list(shots)
        self._waits = self.shots[-1].awaited is not None
        self._looks = min(LOOKS + size_bytes // _BYTES_PER_LOOK, _MOST_LOOKS)
        """How often a call looks for the other ranks' part before it publishes that it waits. Longer arrays take more
        time, so their calls look more often."""

    def run(self, args: Sequence[Any], outputs: Sequence[Array] | None = None) -> Work | None:
        """Make a call. The caller knows that nothing is pending in this process. A timeout aborts the group.

        With ``outputs`` return the call as a `Work`, which has ended if the other ranks have come within a moment.
        """
        link, eager = self._link, self._eager
        link.sequence = sequence = link.sequence + 1
        output, x = args[self._output], args[self._input]
        if self._apart is not None:
            x = self._apart(x, output)
        steps = self.shoot(output, x, sequence.to_bytes(8, "little") + self._record)
        event = operation = frame = None
        try:
            for event in steps:
                # An asynchronous call does not test other events, because that may do all the work of a long array.
                if outputs is None or type(event) is SpinWait:
                    # The caller is looked up now, because that takes time, and the other ranks have not arrived yet.
                    frame = frame or caller(4)
                    if eager.spin(event.Test, self._looks):
                        continue
                if outputs is not None:
                    return self._submit(args, outputs, _continued(event, steps))
                if operation is None:
                    operation = recorder.begin(self._call, sequence)
                    operation.limited = True
                    self._monitor.publish(sequence, self._call.record)
                self._wait(event, operation)
        except BaseException as error:  # a Ctrl-C is among them
            if not isinstance(error, BlockError):  # a BlockError is raised when all messages have ended
                _abandoned.append((args, event, steps))
            if isinstance(error, (DistError, MPI.Exception)):  # an error of MPI may mean that a rank has died
                if operation is None:
                    self._monitor.publish(recorder.begin(self._call, sequence).number, self._call.record)
                self._monitor.verify_failed(sequence, error)
            raise
        if operation is not None:
            self._monitor.verify(sequence)
            operation.end = monotonic()
            return None
        frame, now = frame or caller(4), monotonic()
        append((self._call, sequence, frame.f_code, frame.f_lasti, now, now))
        if not self._waits:
            self._monitor.publish(sequence, self._call.record)
        return None if outputs is None else Ended(outputs)

    def _submit(self, args: Sequence[Any], outputs: Sequence[Array], steps: Steps) -> Work:
        """Queue the rest of a call."""
        link, monitor = self._link, self._monitor
        with requests.lock:
            operation = recorder.begin(self._call, link.sequence)
            if not monitor.publish(link.sequence, self._call.record):
                steps = monitor.verifying(link.sequence, steps)
            return link.queue.submit(steps, operation, outputs, sorted(spans_of(args)))

    def _wait(self, event: Awaited, operation: Operation) -> None:
        limit_s = self._link.timeout_s
        if not requests.poll_until(event.Test, operation, limit_s):
            error = requests.timed_out(operation, limit_s)
            self._monitor.abort(error)
            raise error

    def steps(self, link: Link, call: Call, *args: Any) -> Steps:
        # If the call is a later step of an operation, its record has no number. Meanwhile the program may have made
        # other calls, so `link.sequence` may differ between ranks.
        record = self._call.record.pack(0 if link.now is link.later else link.sequence)
        output, x = args[self._output], args[self._input]
        if len(link.queue):
            yield READY
        if self._apart is not None:
            x = self._apart(x, output)
        yield from self.shoot(output, x, record)

    def shoot(self, output: Any, x: Any, record: bytes, first: int = 0) -> Steps:
        """Make the shots from the ``first`` one on."""
        eager = self._eager
        for shot in self.shots[first:] if first else self.shots:
            if not eager.writable():
                yield eager.spin_wait(eager.writable)
            shown, awaited = shot.shown, shot.awaited
            part = x if shown is whole else None if shown is None else shown(x)
            current = eager.begin(shot.rounds, record, part, shot.write)
            if awaited is not None and not awaited.happened():
                yield awaited
            if shot.end is not None:
                rest = shot.end(current, output if shot.result is whole else shot.result(output))
                if rest is not None:
                    if rest is not ENOUGH:
                        yield rest
                    return


def _continued(event: Awaited, steps: Steps) -> Steps:
    yield event
    yield from steps


def meeting(eager: EagerBuffers) -> Shot:
    """Return a shot without arrays, which is a barrier."""
    return Shot(eager.rounds((0,), np.dtype(np.uint8)), None, whole, None, eager.arrival, None)


def apart(x: Array, output: Array) -> Array:
    return x.copy() if np.may_share_memory(x, output) else x


def whole(x: Array) -> Array:
    return x


def _pieces(count: int, itemsize: int, buffer_bytes: int) -> Iterator[slice]:
    """Return slices of ``count`` elements that fit into a buffer. There is at least one."""
    step = buffer_bytes // itemsize
    return (slice(start, min(start + step, count)) for start in range(0, max(count, 1), step))


def _flat(x: Array) -> Array:
    """Return ``x`` flat, as bytes if its elements are large."""
    return x.reshape(-1) if x.itemsize <= _ELEMENT_BYTES else as_bytes(x)


def _in_place(link: Link, output: Array, x: Array, op: ReduceOp | None, root: int) -> Iterator[Shot]:
    """Yield the shots of a broadcast, all-reduce or reduce, whose input and result are one array."""
    eager = link[EagerBuffers]
    cuts: Iterable[Cut] = (whole,)
    if x.size * _shown_in(x.dtype, op).itemsize > eager.buffer_bytes:
        flat = _flat(x)
        pieces = _pieces(flat.size, _shown_in(flat.dtype, op).itemsize, eager.buffer_bytes)
        cuts = (functools.partial(_piece, piece) for piece in pieces)
    for cut in cuts:
        part = cut(x)
        rounds = eager.rounds(part.shape, _shown_in(part.dtype, op))
        if op is None and root != link.rank:
            yield Shot(rounds, None, cut, None, eager.arrival_of(root), functools.partial(_take_row, root))
        elif op is not None and root in (NO_ROOT, link.rank):
            yield Shot(rounds, cut, cut, _multiplying(op), eager.arrival, _reduction(op, part.dtype))
        else:
            yield Shot(rounds, cut, cut, _multiplying(op), None, None)


def _piece(piece: slice, x: Array) -> Array:
    return _flat(x)[piece]


def _take_row(root: int, current: Round, out: Array) -> None:
    out[...] = current.rows[root]


def _reduce_scatter(link: Link, output: Array, x: Array, op: ReduceOp | None, root: int) -> Iterator[Shot]:
    assert op is not None
    eager = link[EagerBuffers]
    reduction, shown_in = _reduction(op, x.dtype), _shown_in(x.dtype, op)
    if x.size * shown_in.itemsize <= eager.buffer_bytes:
        rounds = _own_blocks(link, eager.rounds(x.shape, shown_in), output.shape)
        yield Shot(rounds, whole, whole, _multiplying(op), eager.arrival, reduction)
        return
    for piece in _pieces(output.size, shown_in.itemsize * link.size, eager.buffer_bytes):
        length = piece.stop - piece.start
        rounds = _own_blocks(link, eager.rounds((link.size, length), shown_in), (length,))
        shown = functools.partial(_columns, link.size, piece)
        cut, write = functools.partial(_piece, piece), _multiplying(op) or np.copyto
        yield Shot(rounds, shown, cut, write, eager.arrival, reduction)


def _own_blocks(link: Link, rounds: Iterable[Round], block: tuple[int, ...]) -> list[Round]:
    blocks = [(each, [row.reshape(link.size, *block)[link.rank, ...] for row in each.rows]) for each in rounds]
    return [replace(each, rows=rows, later_rows=rows[2:]) for each, rows in blocks]


def _columns(ranks: int, piece: slice, x: Array) -> Array:
    return _flat(x).reshape(ranks, -1)[:, piece]


def _all_gather(link: Link, output: Array, x: Array, op: ReduceOp | None, root: int) -> Iterator[Shot]:
    eager = link[EagerBuffers]
    if x.nbytes <= eager.buffer_bytes:
        rounds = eager.rounds(x.shape, x.dtype, joined=True)
        rounds = [replace(each, table=each.table.reshape(output.shape)) for each in rounds]
        yield Shot(rounds, whole, whole, None, eager.arrival, _take_table)
        return
    flat = _flat(x)
    for piece in _pieces(flat.size, flat.itemsize, eager.buffer_bytes):
        rounds = eager.rounds((piece.stop - piece.start,), flat.dtype)
        result = functools.partial(_columns, link.size, piece)
        yield Shot(rounds, functools.partial(_piece, piece), result, None, eager.arrival, _take_table)


def _take_table(current: Round, out: Array) -> None:
    out[...] = current.table


SHOTS: dict[str, Callable[[Link, Array, Array, ReduceOp | None, int], Iterator[Shot]]] = {
    "broadcast": _in_place,
    "all_reduce": _in_place,
    "reduce": _in_place,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}
"""For each operation, the function that yields the shots of a call with arrays like a given output and input."""


def _shown_in(dtype: np.dtype[Any], op: ReduceOp | None) -> np.dtype[Any]:
    return dtype if op is None or op.factor is None else accumulated_in(dtype)


def _multiplying(op: ReduceOp | None) -> Callable[[Array, Array], object] | None:
    return None if op is None or op.factor is None else functools.partial(_write_multiplied, op)


def _write_multiplied(op: ReduceOp, out: Array, x: Array) -> None:
    out[...] = x
    premultiply(op, out)


def _reduction(op: ReduceOp, dtype: np.dtype[Any]) -> Callable[[Round, Array], None]:
    combine, averages = getattr(np, op._combining), op is ReduceOp.AVG

    def combined(current: Round, out: Array) -> None:
        rows = current.rows
        combine(rows[0], rows[1], out=out)  # NumPy's maximum and minimum deprecate a positional `out`
        for row in current.later_rows:
            combine(out, row, out=out)
        if averages:
            finish(op, out, len(rows))

    def combined_wide(current: Round, out: Array) -> None:
        rows = [row.reshape(-1) for row in current.rows]
        reduce_rows(op, rows, (out.reshape(-1),), len(rows))

    return combined_wide if is_half(dtype) or op._merges else combined
