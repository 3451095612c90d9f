"""Streams and events whose work is done as late as CUDA allows, and in any order that it allows.

Work that a stream is given is queued. It is done when an event is asked about often enough, or something is
synchronised: then only the work that this needs. So a program that forgets to wait reads what was there before, in a
test as on a device.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import weakref
from collections import deque
from typing import Any

_random = random.Random(0)
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
_busy: dict[tuple[int, int, int], Stream] = {}  # streams with work; one that the program has dropped still does it
_pointers = itertools.count(0x1000, 0x10)
_nulls: dict[tuple[int, int], Stream] = {}  # the default stream of each device, or of each device and thread
_lists = threading.RLock()  # held for moments, never while work is done
_after_idle: list[Any] = []  # memory that queued work may still point to


PER_THREAD = os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") == "1"
"""True if each thread has a default stream of its own."""


class _Thread(threading.local):
    """The streams that are current in a thread, of each device the latest last."""

    def __init__(self) -> None:
        self.streams: dict[int, list[Stream]] = {}


_thread = _Thread()


def _runtime() -> Any:
    from .cuda import runtime

    return runtime


def get_device() -> int:
    """Return the number of the device that is current in this thread."""
    return int(_runtime().getDevice())


class Stream:
    """A queue of work (``cupy.cuda.Stream``)."""

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self.ptr = 0 if null else 2 if ptds else next(_pointers)
        device = get_device()
        self.device_id = -1 if null or ptds else device
        self.key = self.ptr, device, 0
        self.at_work = threading.RLock()
        self.work: deque[tuple[str, Any]] = deque()
        _streams.setdefault(self.ptr, self)

    def put(self, kind: str, what: Any) -> None:
        """Queue work: ``run`` a function, ``record`` an event, ``wait`` for one."""
        with _lists:
            self.work.append((kind, what))
            _busy[self.key] = self

    def _expect_current_device(self) -> None:
        if self.device_id not in (-1, get_device()):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device"
                f" ({get_device()})"
            )

    def __enter__(self) -> Stream:
        self._expect_current_device()
        _stack().append(self if self.ptr not in _DEFAULTS else _null(get_device()))
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def record(self, event: Event | None = None) -> Event:
        """Record an event behind what is queued."""
        event = event or Event()
        if event.device_id != (get_device() if self.device_id < 0 else self.device_id):
            raise _runtime().CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        event.recorded += 1
        event.places[event.recorded] = self
        self.put("record", (event, event.recorded))
        return event

    def wait_event(self, event: Event) -> None:
        """Let later work wait for an event as it is recorded now."""
        if event.recorded:
            self.put("wait", (event, event.recorded))

    def synchronize(self) -> None:
        """Do all its work."""
        while self.work:
            _do_first(self)


class ExternalStream:
    """A stream by its address, as another library would tell it (``cupy.cuda.ExternalStream``)."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self._stream = stream_at(ptr)
        assert device_id in (-1, self._stream.device_id, get_device()), "a stream of another device"

    def __enter__(self) -> Stream:
        return self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)


class Event:
    """A point in a stream (``cupy.cuda.Event``)."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.recorded = self.reached = 0
        self.places: dict[int, Stream] = {}
        self.ptr = next(_pointers)
        self.device_id = get_device()
        _events[self.ptr] = self

    @property
    def done(self) -> bool:
        """Help the queued work on a little; return True if the event has been reached."""
        nudge()
        return self.reached >= self.recorded

    def synchronize(self) -> None:
        """Do what is before it."""
        if _runtime().failed:
            raise _runtime().CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
        _reach(self, self.recorded)


def _reach(event: Event, generation: int) -> None:
    while event.reached < generation:
        _do_first(event.places[generation])


def _do_first(stream: Stream) -> None:
    """Do the first piece of a stream's work, and before it whatever that waits for."""
    with stream.at_work:
        if not stream.work:  # another thread has done it
            return
        kind, what = stream.work[0]
        if kind == "wait":
            _reach(*what)
        if stream.work and stream.work[0] == (kind, what):
            _done(stream)


def _done(stream: Stream) -> None:
    kind, what = stream.work[0]
    if kind == "run":
        what()
    elif kind == "record":
        event, generation = what
        event.reached = max(event.reached, generation)
        event.places.pop(generation, None)
    with _lists:
        stream.work.popleft()  # only now: what is dropped meanwhile sees that the stream is at work
        if not stream.work:
            _busy.pop(stream.key, None)
        if not _busy:
            _after_idle.clear()


def nudge() -> None:
    """Perhaps do one piece of work of some stream that can."""
    if _random.random() < 0.4:
        return
    with _lists:
        able = [stream for stream in _busy.values() if _is_able(stream)]
    if not able:
        return
    stream = _random.choice(able)
    if stream.at_work.acquire(blocking=False):  # else another thread does its work
        try:
            if stream.work and _is_able(stream):
                _done(stream)
        finally:
            stream.at_work.release()


def _is_able(stream: Stream) -> bool:
    kind, what = stream.work[0]
    return bool(kind != "wait" or what[0].reached >= what[1])


def keep_until_idle(memory: object) -> None:
    """Keep memory that work may point to, which on a device would merely be somebody else's by then."""
    if _busy:
        _after_idle.append(memory)


def synchronize_all() -> None:
    """Do everything."""
    while _busy:
        for stream in list(_busy.values()):
            stream.synchronize()


_DEFAULTS = (0, 1, 2)
"""The addresses that CUDA takes for a default stream."""


def _null(device: int) -> Stream:
    """Return the default stream of a device."""
    thread = threading.get_ident() if PER_THREAD else 0
    with _lists:
        if (device, thread) not in _nulls:
            made = _nulls[device, thread] = Stream(null=not PER_THREAD, ptds=PER_THREAD)
            made.key = made.ptr, device, thread
        return _nulls[device, thread]


def _stack() -> list[Stream]:
    """Return the streams of the current device that are current in this thread, and were before."""
    return _thread.streams.setdefault(get_device(), [])


def get_current_stream(device_id: int = -1) -> Stream:
    """Return the stream that is current in this thread, of a device or of the current one."""
    device = get_device() if device_id < 0 else device_id
    streams = _thread.streams.get(device)
    return streams[-1] if streams else _null(device)


def event_at(pointer: int) -> Event:
    """Return the event with an address."""
    return _events[pointer]


def stream_at(pointer: int) -> Stream:
    """Return the stream with an address; 0 is the default stream of the current device."""
    return _null(get_device()) if pointer in _DEFAULTS else _streams[pointer]
