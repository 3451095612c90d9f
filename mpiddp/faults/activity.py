"""The activity of this process: its operation, or its program's line."""

import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from mpiddp.mpi.operation import Operation, waiting
from mpiddp.mpi.recorder import PACKAGE, is_program

_unwound: tuple[str, Operation | None] | None = None
"""The main thread's last activity before an exception unwound its stack; None before such an exception."""


def current() -> tuple[str, Operation | None]:
    """Return the main thread's line, as in "train.py:120 in backward", and the operation in which it waits.

    If only other threads wait, return those of one of them.
    """
    main = threading.main_thread().ident or 0
    operations = dict(waiting)
    if not operations and _unwound is not None:
        return _unwound
    thread = main if main in operations or not operations else next(iter(operations))
    return _line(_summaries(thread)), operations.get(thread)


def _summaries(thread: int) -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(thread)
    frames = [] if frame is None else [*traceback.walk_stack(frame)]
    return list(traceback.StackSummary.extract(reversed(frames), lookup_lines=False))


def _line(summaries: list[traceback.FrameSummary]) -> str:
    own = [each for each in summaries if is_program(each.filename)]
    if not summaries:
        return ""
    at = (own or summaries)[-1]
    return f"{Path(at.filename).name}:{at.lineno} in {at.name}"


def _program(summaries: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames without the package's own ones at the inner end."""
    end = len(summaries)
    while end and summaries[end - 1].filename.startswith((PACKAGE, "<frozen")):
        end -= 1
    return summaries[:end] or summaries


def stack(thread: int) -> str:
    return "".join(["Waiting (most recent call last):\n", *traceback.format_list(_program(_summaries(thread)))])


def stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    texts = [
        f"thread {names.get(each, 'of a library')}:\n" + "".join(traceback.format_stack(frame))
        for each, frame in frames.items()
    ]
    return "".join(texts)


def unwind(trace: TracebackType | None) -> tuple[str, Operation | None]:
    """Return the program's lines of a traceback, and the operation in whose wait the exception was raised.

    From now on `current` returns this line and operation while no thread waits, because the stack itself is gone.
    """
    global _unwound
    summaries = list(traceback.extract_tb(trace))
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    held = (frame.f_locals.get("operation") for frame in reversed(frames))
    operation = next((each for each in held if isinstance(each, Operation)), None)
    _unwound = _line(summaries), operation
    return "".join(["At (most recent call last):\n", *traceback.format_list(_program(summaries))]), operation
