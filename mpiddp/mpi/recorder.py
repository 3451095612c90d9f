"""The flight recorder: the last operations of this rank, in a ring buffer.

A call is recorded as an `Operation` when it begins; `Recorded` tells the two exceptions. All texts about it are made
when they are needed, such as for a dump. An operation refers to no array and no plan. It refers to its group's link,
which gives up its resources when the group ends.
"""

import functools
import os
import sysconfig
import warnings
from collections import deque
from pathlib import Path
from sys import _getframe as getframe
from time import monotonic
from types import CodeType, FrameType
from typing import Any, TypeAlias

from .operation import Call, Operation

SIZE = 2000

Recorded: TypeAlias = Operation | tuple[Any, ...] | list[Any]
"""A short call that waited for no rank is recorded at its end, as a tuple of an operation's arguments. Its beginning
and end are the same time, because a second look at the clock would be a third of the recorder's cost. A message is
recorded as a list of these arguments, whose last item is set at its end, because an operation takes five times as long
to make.
"""

ring: deque[Recorded] = deque(maxlen=SIZE)
append = ring.append


def entries() -> list[Operation]:
    """Return the last operations of this rank, oldest first."""
    return [each if isinstance(each, Operation) else Operation(*each) for each in tuple(ring)]


def caller(depth: int) -> FrameType:
    """Return the frame of the program's line, which is mostly ``depth`` frames up the stack."""
    try:
        frame = getframe(depth)  # the frame above those of this package
    except ValueError:  # the stack is shorter if C makes the call, as for atexit
        frame = getframe(1)
    return frame if frame.f_code.co_filename in program_files else program_frame(frame)


def begin(call: Call, number: int, depth: int = 3) -> Operation:
    """Record that a call begins."""
    frame = caller(depth + 1)
    append(operation := Operation(call, number, frame.f_code, frame.f_lasti, monotonic()))
    return operation


PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PROGRAMS = tuple(PACKAGE + name + os.sep for name in ("bench", "examples", "training"))
_libraries: tuple[str, ...] = (
    PACKAGE,
    "<frozen",
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
)
program_files: set[str] = set()


def add_library(folder: str) -> None:
    """Let the files of a folder count as a library's, so that no line of them is reported as the program's."""
    global _libraries
    _libraries += (folder + os.sep,)
    program_files.clear()
    is_program.cache_clear()


@functools.cache
def is_program(file: str) -> bool:
    """Return False for files of libraries, of Python, and of this package except its commands and examples."""
    return file.startswith(_PROGRAMS) or not file.startswith(_libraries)


def program_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame that belongs to the program, or ``frame`` if none does."""
    found: FrameType | None = frame
    while found is not None:
        file = found.f_code.co_filename
        if is_program(file):
            program_files.add(file)
            return found
        found = found.f_back
    return frame


def warn(text: str) -> None:
    """Warn at the program's line, however many frames of the package are between."""
    frame = program_frame(getframe(1))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)


def line(operation: Operation) -> str:
    """Return the file and line of the program's call."""
    return f"{operation.code.co_filename}:{line_number(operation.code, operation.offset)}"


def line_number(code: CodeType, offset: int) -> int:
    return next((line or 0 for start, end, line in code.co_lines() if start <= offset < end), code.co_firstlineno)
