"""``Stream``: batches of samples that solvers send while they run. The README beside it describes the messages."""

from __future__ import annotations

import atexit
import os
import re
import time
from collections import Counter, deque, namedtuple
from collections.abc import Callable, Sequence
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

TAG = 31000
"""The first of the four tags: credits, description, sample, end."""
_MODES = ("wait", "drop", "stop")
_STOP = _MODES.index("stop")
_FIELD = re.compile(r"\s*(\w+)\s+(bool|[a-z]+\d+)((?:\s+\d+)*)\s*")
_POLLS_BEFORE_YIELD, _POLLS_BEFORE_SLEEP, _SLEEP_S = 1_000, 4_000, 50e-6
_POLLS_OF_SAMPLES, _POLLS_PER_LOOK = 8, 64
_LOOK_S = 1.0
_TOO_LONG = -1
_kept: list[Stream] = []
"""Streams whose sources have not ended."""


def get_include() -> str:
    """Return the folder of ``mpiddp_stream.h``, ``mpiddp_stream.c`` and ``mpiddp_stream.f90``, for ``mpicc -I``."""
    return str(Path(__file__).parent)


class Stream:
    """Iterate over batches of samples that other ranks send while they compute, with plain MPI and without mpiddp.

    Sources and trainers share a communicator. Each source sends to one trainer, or to several in turn if there are
    fewer sources than trainers. The iteration ends after the last sample of the last source. It cannot begin again.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Contains the sources and this rank; of an intercommunicator the sources are in the remote group. Nothing is
        called on it that needs other ranks. While a stream is open its four tags, from ``tag`` on, are the stream's.
    sources : sequence of int
        The ranks in ``comm`` of all sources, the same on every trainer.
    fields : str or numpy.dtype, optional
        The fields of a sample, as in ``"x float32 64 64; step int64"``: names, dtypes and shapes, or a structured
        dtype. By default the first source tells them. All sources have to agree.
    batch_size : int
        Samples in a batch of this rank. The last batch may be smaller, unless ``drop_last``.
    capacity : int
        Samples held. Memory is for twice ``window`` more of each source.
    policy : {"reservoir", "fifo"}
        ``"reservoir"`` draws any held sample with the same chance, so that a sample may come several times. Training
        waits for no source once there are ``min_fill``. If more arrive than fit, a sample leaves that was drawn, any
        with the same chance; every sample is drawn at least once. After the end each draw removes its sample.
        ``"fifo"`` hands over each sample once, in the order of arrival.
    min_fill : int
        Samples held before the first draw.
    window : int
        Samples that a source may have sent and this rank not confirmed. They are received into the memory that batches
        are made from, without another copy.
    full : {"wait", "drop"}
        The behaviour of a source that may send no more: wait, or drop its sample.
    seed : int
        Of the draws; ranks draw differently.
    num_replicas, rank : int, optional
        The number of trainers, and which one this is. Default: the world's if there is a process group, else one.
    tag : int
        The first of four tags, for several streams on one communicator.
    timeout : float, optional
        Seconds to wait for a sample. Default: MPIDDP_TIMEOUT.

    Raises
    ------
    DistTimeoutError
        While iterating, if no sample came in time; the text names the sources. A warning names them after
        MPIDDP_WARN_AFTER seconds, also while a reservoir goes on without them.
    MismatchError
        While iterating, if a source's fields or the size of its sample are others.

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
        window: int = 8,
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
        if not 0 < count <= (comm.remote_size if comm.is_inter else comm.size) or len(set(sources)) != count:
            raise ValueError(f"sources should be different ranks of the communicator, at least one; got {sources}")
        own = [i for i in range(count) if i % num_replicas == rank % count]
        self.comm, self.batch_size, self.capacity, self.drop_last = (
            comm,
            checked_batch_size(batch_size),
            capacity,
            drop_last,
        )
        self.sources = [sources[i] for i in own]
        """The ranks in ``comm`` that send to this one."""
        self.dtype: np.dtype[Any] | None = None
        """The structured dtype of a sample, once it is known."""
        self._tag, self._mode, self._min_fill, self._window = tag, _MODES.index(full), min_fill, window
        self._policy = (Reservoir if policy == "reservoir" else Fifo)((seed << 20) + rank)
        self._timeout_s = settings.default_timeout_s() if timeout is None else timeout
        self._warn_s = self._first_warning_s = settings.warn_after_s() or float("inf")
        self._status = MPI.Status()
        self._live = set(self.sources)
        self._undescribed = set(self.sources)
        self._out = dict.fromkeys(self.sources, window)
        """Credits that each source has left, as far as this rank knows."""
        self._due = dict.fromkeys(self.sources, 0)
        """Credits to be sent to each source."""
        self._owed: deque[int] = deque()
        """Sources of samples that have not been confirmed."""
        self._ends: dict[int, int] = {}
        self._received = dict.fromkeys(self.sources, 0)
        self._heard = dict.fromkeys(self.sources, time.monotonic())
        self._looked = 0.0
        self._posted: deque[tuple[Any, int]] = deque()
        self._free: list[int] = []
        self._told: list[tuple[Any, Array]] = []
        self._closing = False
        self._counts: Counter[str] = Counter()
        self._waited_s = 0.0
        if fields is not None:
            self._make(np.dtype(_parsed(fields) if isinstance(fields, str) else fields))
        for i in own:
            self._tell(sources[i], window, sum(each % count == i % num_replicas for each in everyone))
        # A trainer that ends early must not leave its sources waiting.
        atexit.register(self.close)

    def __iter__(self) -> Stream:
        return self

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Any:
        policy = self._policy
        self._progress()
        self._look()
        if self._live and not self._ready():
            self._wait(self._ready)
        slots, leaving = policy.draw(self.batch_size, last=not self._live)
        if not slots or (self.drop_last and len(slots) < self.batch_size):
            raise StopIteration
        batch = self._batch(*(self._samples[name][slots] for name in self._names))
        self._counts["drawn"] += len(slots)
        self._free += leaving
        self._settle()
        return batch

    def _ready(self) -> bool:
        return not self._live or self._policy.ready(self.batch_size, self._min_fill)

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of samples since the beginning, and of what is held.

        ``received``, ``drawn`` and ``left``, the drawn ones that made room for others; ``held`` and ``seen``, those of
        them that were drawn; ``waited_s``, the time in which this rank waited for samples. Sources tell at their end
        how many samples they have ``dropped``, and how many waited for this rank, ``slowed``.
        """
        counts = {name: self._counts[name] for name in ("received", "drawn", "left", "dropped", "slowed")}
        return {**counts, "held": len(self._policy.slots), "seen": self._policy.seen, "waited_s": self._waited_s}

    def close(self) -> None:
        """Tell the sources to stop, drop what they have sent meanwhile, and wait for their end.

        A source hears of it when it sends its next sample. DistTimeoutError names those that do not.
        """
        if not self._closing:
            for source in self._live:
                self._tell(source, 0, mode=_STOP)
        self._closing = True
        atexit.unregister(self.close)
        try:
            self._wait(lambda: not self._live)
        except BaseException:
            _kept.append(self)  # a source that is late still sends to its memory
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the samples held, as bytes uint8 (held, size), which of them were drawn, the random numbers, counts.

        Samples that sources have sent and this rank has not received are not in it, nor is the state of the sources:
        after a restart they go on wherever they start.
        """
        dtype = np.dtype([]) if self.dtype is None else self.dtype
        samples = self._bytes[self._policy.slots] if self.dtype else np.empty((0, 0), np.uint8)
        return {"fields": text_of(dtype), "samples": samples, "counts": dict(self._counts), **self._policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin with the samples of ``state``, before the first batch of this stream.

        ValueError if batches were drawn, or the samples have other fields or are more than a stream of this capacity,
        window and sources holds.
        """
        dtype = _parsed(state["fields"]) if state["fields"] else None
        held, known = len(state["samples"]), self.dtype in (None, dtype)
        # Samples that had not been confirmed are held beyond the capacity.
        if self._policy.slots or self._counts or held > self.capacity + self._window * len(self.sources) or not known:
            raise ValueError(
                f"load_state_dict needs a new stream of the fields '{state['fields']}' with capacity {held} or more; "
                f"got one with capacity {self.capacity}, {self._counts['received']} samples received, and the fields "
                f"'{text_of(self.dtype or np.dtype([]))}'"
            )
        if dtype is not None:
            if self.dtype is None:
                self._make(dtype)
            slots = [self._free.pop() for _ in range(held)]
            self._bytes[slots] = state["samples"]
            self._policy.load_state_dict(state, slots)
        self._counts.update(state["counts"])

    def _make(self, dtype: np.dtype[Any]) -> None:
        """Make memory for samples, and begin to receive."""
        if (
            dtype.names is None
            or dtype.hasobject
            or dtype.itemsize != sum(dtype[each].itemsize for each in dtype.names)
        ):
            raise ValueError(f"fields should be a structured dtype of numbers without gaps (align=False); got {dtype}")
        self.dtype = dtype
        self._names = dtype.names
        self._batch = namedtuple("Batch", dtype.names, rename=True)  # type: ignore[misc]
        count = self.capacity + 2 * self._window * len(self.sources)  # with those of `load_state_dict`
        self._bytes = np.empty((count, dtype.itemsize), np.uint8)
        self._samples = self._bytes.view(dtype)[:, 0]
        self._rooms = [[each, MPI.BYTE] for each in self._bytes]
        self._free = list(range(count))[::-1]
        for _ in range(self._window * len(self.sources)):
            self._post()

    def _post(self) -> None:
        slot = self._free.pop()
        self._posted.append((self.comm.Irecv(self._rooms[slot], MPI.ANY_SOURCE, self._tag + 2), slot))

    def _tell(self, source: int, credits: int, trainers: int = 0, mode: int | None = None) -> None:
        news = np.array([credits, self._mode if mode is None else mode, trainers], np.int64)
        self._told = [each for each in self._told if not each[0].Test()]
        self._told.append((self.comm.Isend([news, MPI.INT64_T], source, self._tag), news))

    def _progress(self, listen: bool = True) -> bool:
        """Take samples that have arrived, and return True if there are any; else ``listen`` to what is no sample."""
        status, posted, arrived = self._status, self._posted, False
        try:
            while posted and posted[0][0].Test(status):
                self._arrive(status.source, status.count, posted.popleft()[1])
                arrived = True
            if listen and not arrived:
                self._hear()
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_TRUNCATE and status.source in self._live:
                self._arrive(status.source, _TOO_LONG, posted.popleft()[1])
                return True
            raise DistError(f"Stream cannot receive: {error}. It waits for {self._states()}") from error
        return arrived

    def _arrive(self, source: int, count: int, slot: int) -> None:
        assert self.dtype is not None
        if expected := source in self._live:
            self._counts["received"] += 1
            self._received[source] += 1
            self._heard[source] = time.monotonic()
            self._out[source] -= 1
            self._end_if_complete(source)  # before anything can raise: its end may have come first
        if self._closing:
            self._free.append(slot)
        elif expected and count == self.dtype.itemsize:
            self._policy.add(slot)
            self._owed.append(source)
            self._settle()
        else:
            self._free.append(slot)
            self._hear()  # its description says more
            size = "too long a sample" if count == _TOO_LONG else f"a sample of {count} bytes"
            raise MismatchError(
                f"Stream got {size} from rank {source}, and expected one of {self.dtype.itemsize} bytes "
                f"('{text_of(self.dtype)}') from {ranges(self.sources)}; let every source send all fields, to the "
                "ranks that it got credits from"
            )

    def _settle(self) -> None:
        """Let drawn samples leave if there are too many, and confirm samples if there is room for others."""
        policy, owed = self._policy, self._owed
        while len(policy.slots) > self.capacity and (slot := policy.evict()) is not None:
            self._free.append(slot)
            self._counts["left"] += 1
        while owed and len(policy.slots) <= self.capacity:
            source = owed.popleft()
            if source not in self._live or source in self._ends:
                continue
            self._post()
            if not self._out[source]:
                self._heard[source] = time.monotonic()  # it could not send
            self._out[source] += 1
            self._due[source] += 1
            # Few messages: the source has as many credits left.
            if 2 * self._due[source] >= self._window:
                self._tell(source, self._due[source])
                self._due[source] = 0

    def _hear(self) -> None:
        """Receive descriptions and ends."""
        status, comm = self._status, self.comm
        while self._undescribed and comm.Iprobe(MPI.ANY_SOURCE, self._tag + 1, status):
            source, letters = status.source, np.empty(status.count, np.uint8)
            comm.Recv([letters, MPI.CHAR], source, self._tag + 1)
            self._undescribed.discard(source)
            self._end_if_complete(source)
            fields = _parsed(letters.tobytes().decode())
            if self.dtype is None:
                self._make(fields)
            elif fields != self.dtype:
                raise MismatchError(
                    f"Stream's source {source} has '{text_of(fields)}', where '{text_of(self.dtype)}' is expected: "
                    "all sources and the argument fields have to say the same"
                )
        while self._live and comm.Iprobe(MPI.ANY_SOURCE, self._tag + 3, status):
            source, end = status.source, np.empty(3, np.int64)
            comm.Recv([end, MPI.INT64_T], source, self._tag + 3)
            self._ends[source] = int(end[0])
            self._counts.update(dropped=int(end[1]), slowed=int(end[2]))
            self._end_if_complete(source)

    def _end_if_complete(self, source: int) -> None:
        complete = source not in self._undescribed and self._ends.get(source) == self._received[source]
        if source not in self._live or not complete:
            return  # MPI does not order messages of different tags
        self._live.remove(source)
        if not self._closing:
            self._tell(source, 0, mode=_STOP)
        if not self._live:
            atexit.unregister(self.close)
            while self._posted:
                request, slot = self._posted.pop()
                request.Cancel()
                request.Wait()
                self._free.append(slot)

    def _wait(self, done: Callable[[], bool]) -> None:
        began, polls = time.monotonic(), 0
        while not done():
            # Few calls of MPI between two looks at the sample that comes next.
            others_too = polls % _POLLS_OF_SAMPLES == 0
            if self._progress(others_too):
                polls, now = 1, time.monotonic()
                self._waited_s += now - began
                began = now
                continue
            if others_too:
                requests.poll()  # other ranks may wait for what is pending here
            polls += 1
            if polls > _POLLS_BEFORE_SLEEP:
                time.sleep(_SLEEP_S)
            elif polls > _POLLS_BEFORE_YIELD:
                os.sched_yield()
            if polls % _POLLS_PER_LOOK == 0:
                self._look()
                if time.monotonic() - began > self._timeout_s:
                    raise DistTimeoutError(
                        f"Stream got no sample in {self._timeout_s:g} s. It waits for {self._states()}"
                    )
        self._waited_s += time.monotonic() - began

    def _look(self) -> None:
        """Warn of sources that could send and do not."""
        now = time.monotonic()
        if now - self._looked < min(_LOOK_S, self._first_warning_s / 4):
            return
        self._looked = now
        quiet_s = max((now - self._heard[each] for each in self._live if self._out[each]), default=0.0)
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
        """Return the sources that may send and have not for ``quiet_s``."""
        now, states = time.monotonic(), []
        for source in sorted(self._live):
            silent_s = now - self._heard[source]
            if self._out[source] and silent_s >= quiet_s:
                begun = f"silent for {duration(silent_s)} after {self._received[source]} samples"
                unopened = f"which has not opened its stream in {duration(silent_s)}"
                states.append(f"source {source}, {unopened if source in self._undescribed else begun}")
        return "; ".join(states) or "no source"


def _parsed(text: str) -> np.dtype[Any]:
    found = [(part, _FIELD.fullmatch(part)) for part in text.strip().rstrip(";").split(";")]
    fields: list[tuple[str, str, tuple[int, ...]]] = []
    for part, match in found:
        if match is None:
            raise ValueError(
                f"a field is a name, a dtype and dimensions, as in 'x float32 64 64; step int64'; got {part!r}"
            )
        fields.append((match[1], match[2], tuple(map(int, match[3].split()))))
    return np.dtype(fields)


def text_of(dtype: np.dtype[Any]) -> str:
    """Return a structured dtype as sources write it.

    Examples
    --------
    >>> text_of(np.dtype([("x", "f4", (2, 3)), ("step", "i8")]))
    'x float32 2 3; step int64'
    """
    of = [(name, dtype[name].base.name, *dtype[name].shape) for name in dtype.names or ()]
    return "; ".join(" ".join(map(str, each)) for each in of)


__all__ = ["Stream", "get_include"]
