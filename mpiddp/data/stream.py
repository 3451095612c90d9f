"""``Stream``: batches of samples that solvers send while they run. The README beside it describes the messages."""

import atexit
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mpiddp import settings
from mpiddp.distributed import get_rank, get_world_size, is_initialized
from mpiddp.errors import DistError, DistTimeoutError, MismatchError
from mpiddp.faults import abort
from mpiddp.faults.picture import duration, ranges
from mpiddp.mpi import requests
from mpiddp.mpi.lazy import MPI
from mpiddp.typing import Array

from .reservoir import Fifo, Reservoir
from .samplers import checked_batch_size
from .slots import TOO_LONG, Slots, parsed, text_of

TAG = 31000
"""The first of a stream's four tags, which are for credits, the description of fields, samples, and the end."""
_TAGS = 4
_MODES = ("wait", "drop", "stop")
_STOP = _MODES.index("stop")
_POLLS_BEFORE_YIELD = 1_000
_POLLS_OF_SAMPLES, _POLLS_PER_LOOK = 8, 64
_LOOK_S = 1.0
_open: "list[Stream]" = []
"""Streams with sources that have not ended. These sources may still send into the stream's memory."""


def get_include() -> str:
    """Return the folder of ``mpiddp_stream.h``, ``mpiddp_stream.c`` and ``mpiddp_stream.f90``, for ``mpicc -I``."""
    return str(Path(__file__).parent)


@dataclass(slots=True)
class _Source:
    """The state of a source that has not ended, as far as this rank knows it."""

    heard: float
    due: int = 0
    """Credits that this rank is to send to the source with its next message."""
    owed: int = 0
    """Received samples whose credits wait for room. A source that waits for the whole window cannot send."""
    received: int = 0
    described: bool = False
    sent: int | None = None
    """The number of samples that the source has sent in all, known once it has told its end."""


class Stream(Iterator[Any], AbstractContextManager["Stream"]):
    """Iterate over batches of samples that other ranks send while they compute, with plain MPI and without mpiddp.

    Sources and trainers share a communicator. Each source sends to one trainer, or to several in turn if there are
    fewer sources than trainers. The iteration ends after the last sample of the last source. It cannot begin again.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        A communicator of the sources and this rank. In an intercommunicator the sources are in the remote group. The
        stream makes no collective calls. While it is open, no other messages may use its four tags, from ``tag`` on.
    sources : sequence of int
        The ranks in ``comm`` of all sources, the same on every trainer.
    fields : str or numpy.dtype, optional
        The fields of a sample: names, dtypes and shapes, as in ``"x float32 64 64; step int64"``, or a structured
        dtype. By default the first source that sends its description decides. All sources must have the same fields.
    batch_size : int
        Samples in a batch of this rank. The last batch may be smaller, unless ``drop_last``.
    capacity : int
        Number of samples held. There is memory for twice ``window`` more samples of each source, and MPI takes 1.4 KiB
        beside each sample.
    policy : {"reservoir", "fifo"}
        ``"reservoir"`` draws any held sample with the same chance, so that a sample may come several times. Once there
        are ``min_fill`` samples, training waits for no source. If more samples arrive than fit, samples leave at
        random among those that were drawn, so every sample is drawn at least once. After the sources' end each draw
        removes its sample. ``"fifo"`` hands over each sample once, in the order of arrival.
    min_fill : int
        Samples that have to be held before a draw, until all sources have ended.
    window : int
        Number of samples that a source may send before this rank confirms them. They are received into the memory that
        batches are made from, without another copy. Short samples come faster with a larger window.
    full : {"wait", "drop"}
        The behaviour of a source that has sent its whole window: it waits, or drops its sample.
    seed : int
        Seed of the random draws. Ranks draw differently, although all pass the same seed.
    num_replicas, rank : int, optional
        The number of trainers, and the number of this trainer. Default: those of the world if there is a process group,
        else 1 and 0.
    tag : int
        The first of four tags. Streams that are open on one communicator at the same time need different tags.
    timeout : float, optional
        Seconds to wait for a sample. Default: MPIDDP_TIMEOUT.

    Raises
    ------
    DistTimeoutError
        While iterating, if no sample came in time; the text names the silent sources. A warning names them after
        MPIDDP_WARN_AFTER seconds, also while a reservoir goes on without them.
    MismatchError
        While iterating, if the fields of a source or the size of a sample are not the expected ones.

    Notes
    -----
    A batch is a named tuple of new arrays (n, ...), one for each field. ``with`` closes the stream at the end of the
    block, and the sources are told to stop.

    Examples
    --------
    >>> from mpi4py import MPI  # doctest: +SKIP
    >>> with Stream(MPI.COMM_WORLD, sources=[0], batch_size=32, min_fill=500) as stream:  # doctest: +SKIP
    ...     for x, y in stream:
    ...         train(x, y)
    """

    def __init__(
        self,
        comm: Any,
        sources: Sequence[int],
        fields: str | np.dtype[Any] | None = None,
        *,
        batch_size: int = 1,
        capacity: int = 1000,
        policy: Literal["reservoir", "fifo"] = "reservoir",
        min_fill: int = 1,
        window: int = 128,
        full: Literal["wait", "drop"] = "wait",
        drop_last: bool = False,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        tag: int = TAG,
        timeout: float | None = None,
    ) -> None:
        if policy not in ("reservoir", "fifo") or full not in _MODES[:2]:
            raise ValueError(f"policy is 'reservoir' or 'fifo', and full is 'wait' or 'drop'; got {policy!r}, {full!r}")
        least = min_fill if policy == "reservoir" else max(min_fill, batch_size)
        if window < 1 or not 1 <= least <= capacity:
            raise ValueError(
                f"Stream needs a window of at least 1, and a capacity of at least min_fill (and of batch_size with "
                f"'fifo'); got window {window}, capacity {capacity}, min_fill {min_fill}, batch_size {batch_size}"
            )
        if num_replicas is None:
            num_replicas = get_world_size() if is_initialized() else 1
        if rank is None:
            rank = get_rank() if is_initialized() else 0
        everyone, count = range(num_replicas), len(sources)
        if not 0 < len({*sources} & {*range(comm.remote_size if comm.is_inter else comm.size)}) == count:
            raise ValueError(f"sources should be different ranks of the communicator, at least one; got {sources}")
        if rank not in everyone:
            raise ValueError(f"rank should be below num_replicas, {num_replicas}; got {rank}")
        if any(each.comm == comm and abs(each._tag - tag) < _TAGS for each in _open):
            raise ValueError(
                f"an open stream has some of the tags {tag} to {tag + _TAGS - 1} of this communicator: close it first, "
                f"or give this one and its sources another tag, such as tag={tag + 100}"
            )
        own = [i for i in range(count) if i % num_replicas == rank % count]
        self.comm: Any = comm
        self.batch_size, self.capacity, self.drop_last = checked_batch_size(batch_size), capacity, drop_last
        self.sources = [sources[i] for i in own]
        """The ranks in ``comm`` that send to this rank."""
        self.dtype: np.dtype[Any] | None = None
        """The structured dtype of a sample, once it is known."""
        self._tag: int = tag
        self._mode, self._min_fill, self._window = _MODES.index(full), min_fill, window
        self._policy = (Reservoir if policy == "reservoir" else Fifo)((seed << 20) + rank)
        self._timeout_s = settings.default_timeout_s() if timeout is None else timeout
        self._warn_s = self._first_warning_s = settings.warn_after_s() or float("inf")
        self._status = MPI.Status()
        began = time.monotonic()
        self._live = {source: _Source(began) for source in self.sources}
        self._looked = 0.0
        self._slots: Slots | None = None
        self._told: list[tuple[Any, Array]] = []
        self._closing = False
        self._counts: Counter[str] = Counter()
        self._waited_s = 0.0
        if fields is not None:
            self._make(np.dtype(parsed(fields) if isinstance(fields, str) else fields))
        for i in own:
            self._tell(sources[i], window, sum(each % count == i % num_replicas for each in everyone))
        _open.append(self)
        # A trainer that ends early must not leave its sources waiting.
        atexit.register(self.close)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Any:
        policy = self._policy
        self._expect_whole()
        self._progress()
        self._look()
        if self._live and not self._ready():
            self._wait(self._ready)
        slots, leaving = policy.draw(self.batch_size, last=not self._live)
        if not slots or (self.drop_last and len(slots) < self.batch_size):
            raise StopIteration
        assert self._slots is not None
        batch = self._batch(*(self._slots.samples[name][slots] for name in self._names))
        self._counts["drawn"] += len(slots)
        self._slots.free += leaving
        self._settle()
        return batch

    def _ready(self) -> bool:
        return not self._live or self._policy.ready(self.batch_size, self._min_fill)

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of samples, and the time in which this rank waited for them.

        Since the beginning, ``received`` samples have arrived and ``drawn`` were handed over, counting each draw of
        the same sample; ``left`` made room for others after they had been drawn. ``held`` are in memory now, and
        ``seen`` of these have been drawn. ``waited_s`` is the time in seconds. At their end the sources tell how many
        samples they ``dropped``, and how many had to wait for credits, ``slowed``.
        """
        counts = {name: self._counts[name] for name in ("received", "drawn", "left", "dropped", "slowed")}
        return {**counts, "held": len(self._policy.slots), "seen": self._policy.seen, "waited_s": self._waited_s}

    def close(self) -> None:
        """Tell the sources to stop, drop the samples that are still on their way, and wait for the sources' end.

        A source learns of the stop when it sends its next sample. DistTimeoutError names the sources that do not end.
        """
        if not self._closing:
            for source in self._live:
                self._tell(source, 0, mode=_STOP)
        self._closing = True
        atexit.unregister(self.close)
        self._wait(lambda: not self._live)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples held, the number of them that were drawn, the random generator's state, and the counts.

        The samples are bytes, uint8 (held, size). The state does not have samples that sources have sent and this rank
        has not received. It does not have the state of the sources either: a restarted source decides where it begins.
        """
        self._expect_whole()
        dtype = np.dtype([]) if self.dtype is None else self.dtype
        samples = self._slots.bytes[self._policy.slots] if self._slots else np.empty((0, 0), np.uint8)
        return {"fields": text_of(dtype), "samples": samples, "counts": dict(self._counts), **self._policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin with the samples of ``state``, before the first batch of this stream.

        It raises ValueError if samples have arrived before, if the samples of ``state`` have other fields, or if they
        are more than a stream of this capacity, window and number of sources can hold.
        """
        dtype = parsed(state["fields"]) if state["fields"] else None
        held, known = len(state["samples"]), self.dtype in (None, dtype)
        # A stream holds more than its capacity while it has samples that it has not confirmed.
        if self._policy.slots or self._counts or held > self.capacity + self._window * len(self.sources) or not known:
            raise ValueError(
                f"load_state_dict needs a new stream of the fields '{state['fields']}' with capacity {held} or more; "
                f"got one with capacity {self.capacity}, {self._counts['received']} samples received, and the fields "
                f"'{text_of(self.dtype or np.dtype([]))}'"
            )
        if dtype is not None:
            made = self._slots or self._make(dtype)
            slots = [made.free.pop() for _ in range(held)]
            made.bytes[slots] = state["samples"]
            self._policy.load_state_dict(state, slots)
        self._counts.update(state["counts"])

    def _make(self, dtype: np.dtype[Any]) -> Slots:
        """Make memory for samples, and begin to receive."""
        if not dtype.itemsize or not dtype.names or parsed(text_of(dtype)) != dtype:
            raise ValueError(
                "fields should be names with plain numbers in this machine's byte order, at least one byte in all, and "
                f"without gaps (align=False), as in 'x float32 64 64; step int64'; got {dtype}"
            )
        self.dtype, self._names = dtype, dtype.names
        self._batch = namedtuple("Batch", self._names, rename=True)  # type: ignore[misc]
        window = self._window * len(self.sources)
        count = self.capacity + 2 * window  # load_state_dict may bring one window beyond the capacity
        self._slots = Slots(self.comm, self._tag + 2, dtype, count, window)
        self._slots.post()
        return self._slots

    def _tell(self, source: int, credits: int, trainers: int = 0, mode: int | None = None) -> None:
        news = np.array([credits, self._mode if mode is None else mode, trainers], np.int64)
        self._told = [each for each in self._told if not each[0].Test()]
        self._told.append((self.comm.Isend([news, MPI.INT64_T], source, self._tag), news))

    def _progress(self, listen: bool = True) -> bool:
        """Take the samples that have arrived, and return True if there are any.

        If there are none and ``listen`` is True, receive descriptions and ends.
        """
        try:
            arrived = self._slots is not None and self._arrive(self._slots)
            if listen and not arrived:
                self._hear()
        except MPI.Exception as error:
            raise DistError(f"Stream cannot receive: {error}. It waits for {self._states()}") from error
        return arrived

    def _arrive(self, slots: Slots) -> bool:
        found, sources, size = slots.arrived()
        if not found:
            return False
        ranks, full, now, wrong = {*sources}, slots.bytes.shape[1], time.monotonic(), []
        if size != full or not ranks <= self._live.keys():
            all_three = zip(found, sources, [full] * (len(found) - 1) + [size], strict=True)
            wrong = [each for each in all_three if each[2] != full or each[1] not in self._live]
        for rank in ranks & self._live.keys():
            source, count = self._live[rank], sources.count(rank)
            self._counts["received"] += count
            source.received += count
            source.heard = now
            source.owed += count
            self._end_if_complete(rank)  # its end may have come before its samples; errors are raised only after this
        if self._closing:
            slots.free += found
        else:
            for slot, *_ in wrong:
                found.remove(slot)
                slots.free.append(slot)
            self._policy.add(found)
        if wrong and self._live:
            slots.post()  # a refused sample has taken a slot that a source's sample needs
        if not self._closing:
            self._settle()
            if wrong:
                self._refuse(*wrong[0][1:])
        return True

    def _refuse(self, source: int, size: int) -> None:
        self._hear()  # if the source's description has come and differs, its error says more
        assert self.dtype is not None
        text = "too long a sample" if size == TOO_LONG else f"a sample of {size} bytes"
        raise MismatchError(
            f"Stream got {text} from rank {source}, and expected one of {self.dtype.itemsize} bytes "
            f"('{text_of(self.dtype)}') from {ranges(self.sources)}; let every source send all fields, to the "
            "ranks that it got credits from"
        )

    def _expect_whole(self) -> None:
        """Raise MismatchError if the samples held may have been written over."""
        if self._slots is not None and self._slots.overrun:
            raise MismatchError(
                "Stream cannot go on: it got too long a sample, which this MPI library may have written over others. "
                f"Let every source send {self._slots.bytes.shape[1]} bytes, and begin again, from an earlier state"
            )

    def _settle(self) -> None:
        """Let drawn samples leave if there are too many, and confirm received samples if there is room for more."""
        policy, slots = self._policy, self._slots
        assert slots is not None
        while len(policy.slots) > self.capacity and (slot := policy.evict()) is not None:
            slots.free.append(slot)
            self._counts["left"] += 1
        if len(policy.slots) > self.capacity:
            return
        if self._live:
            slots.post()
        for rank, source in self._live.items():
            if not source.owed or source.sent is not None:
                continue
            if source.owed == self._window:
                source.heard = time.monotonic()  # the source could not send before, so its silence begins now
            source.due += source.owed
            source.owed = 0
            # Credits go out by half windows, to save messages; the source still has the other half.
            if 2 * source.due >= self._window:
                self._tell(rank, source.due)
                source.due = 0

    def _hear(self) -> None:
        """Receive the descriptions that sources send first, and the messages that tell their end."""
        status, comm = self._status, self.comm
        while self._live and comm.Iprobe(MPI.ANY_SOURCE, self._tag + 1, status):
            rank, letters = status.source, np.empty(status.count, np.uint8)
            comm.Recv([letters, MPI.CHAR], rank, self._tag + 1)
            if rank in self._live:  # samples of any other rank are refused
                self._live[rank].described = True
                self._end_if_complete(rank)
            text = letters.tobytes().decode(errors="replace")
            try:
                fields = parsed(text)
                made = self._slots or self._make(fields)
            except ValueError as error:
                raise MismatchError(f"Stream's source {rank} has '{text}': {error}") from None
            if fields != made.samples.dtype:
                raise MismatchError(
                    f"Stream's source {rank} has '{text}', where '{text_of(made.samples.dtype)}' is expected: all "
                    "sources and the argument fields have to say the same"
                )
        while self._live and comm.Iprobe(MPI.ANY_SOURCE, self._tag + 3, status):
            rank, end = status.source, np.empty(3, np.int64)
            comm.Recv([end, MPI.INT64_T], rank, self._tag + 3)
            self._counts.update(dropped=int(end[1]), slowed=int(end[2]))
            if rank in self._live:
                self._live[rank].sent = int(end[0])
                self._end_if_complete(rank)

    def _end_if_complete(self, rank: int) -> None:
        source = self._live[rank]
        if not source.described or source.sent != source.received:
            return  # samples may come after the end: MPI does not order messages of different tags
        del self._live[rank]
        if not self._closing:
            self._tell(rank, 0, mode=_STOP)
        if not self._live:
            _open.remove(self)
            atexit.unregister(self.close)
            if self._slots is not None:
                self._slots.close()

    def _wait(self, done: Callable[[], bool]) -> None:
        began, polls = time.monotonic(), 0
        while not done():
            # Other messages are polled for in few rounds only, so that the next sample is found soon.
            others_too = polls % _POLLS_OF_SAMPLES == 0
            if self._progress(others_too):
                polls, now = 1, time.monotonic()
                self._waited_s += now - began
                began = now
                continue
            if others_too:
                requests.poll()  # other ranks may wait for asynchronous operations of this rank
            polls += 1
            if polls > _POLLS_BEFORE_YIELD:
                requests.pause(polls)
            if polls % _POLLS_PER_LOOK == 0:
                self._look()
                if time.monotonic() - began > self._timeout_s:
                    raise DistTimeoutError(
                        f"Stream got no sample in {self._timeout_s:g} s. It waits for {self._states()}"
                    )
        self._waited_s += time.monotonic() - began

    def _look(self) -> None:
        """Warn of sources that have credits but have sent nothing for long."""
        now = time.monotonic()
        if now - self._looked < min(_LOOK_S, self._first_warning_s / 4):
            return
        self._looked = now
        quiet_s = max((now - each.heard for each in self._live.values() if each.owed != self._window), default=0.0)
        if quiet_s < self._first_warning_s:
            self._warn_s = self._first_warning_s
        elif quiet_s >= self._warn_s:
            self._warn_s = 2 * quiet_s
            states = self._states(self._first_warning_s)
            abort.write(
                f"mpiddp: {duration(quiet_s)} without progress.  Stream waits for {states}\n"
                f"  next warning at {duration(self._warn_s)}, error after {duration(self._timeout_s)} in which it has "
                "nothing to hand over\n"
            )

    def _states(self, quiet_s: float = 0.0) -> str:
        """Return a text about the sources that have credits but have sent nothing for ``quiet_s`` seconds."""
        now, states = time.monotonic(), []
        for rank, source in sorted(self._live.items()):
            silent_s = now - source.heard
            if source.owed != self._window and silent_s >= quiet_s:
                begun = f"silent for {duration(silent_s)} after {source.received} samples"
                unopened = f"which has not opened its stream in {duration(silent_s)}"
                states.append(f"source {rank}, {begun if source.described else unopened}")
        return "; ".join(states) or "no source"
