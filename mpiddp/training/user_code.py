"""Callables that the user names as MODULE:CALLABLE: they are imported and called, and their errors are one sentence."""

import importlib
import os
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any

from .options import UsageError, nearest

_NOT_THEIRS = (f"{Path(__file__).parents[1]}{os.sep}", pkgutil.__file__, str(importlib.__file__), "<frozen ")
"""The beginnings of the names of files that say nothing of a user's error."""


def call(option: str, name: str, kind: type[Any], **arguments: Any) -> Any:
    """Call ``package.module:callable``; UsageError if that fails, or it returns something else than a ``kind``.

    The working directory is searched, too.

    >>> call("--data", "random:Random", object, x=3).randrange(1)
    0
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # sys.path of the console script lacks it
    function = None
    try:
        function = pkgutil.resolve_name(name)
        found = function(**arguments)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
        at = f" ({theirs[-1].filename}, line {theirs[-1].lineno}, in {theirs[-1].name})" if theirs else ""
        near = nearest(str(error.name), dir(error.obj)) if isinstance(error, AttributeError) else ""
        if function is None and isinstance(error, ImportError | ValueError) and not theirs:
            near = "; give a module of this folder or an installed one, as in `import`, without path and .py"
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        raise UsageError(f"{option} {name}: {type(error).__name__}: {error}{near}{notes}{at}") from error
    if not isinstance(found, kind):
        raise UsageError(f"{option} {name} has to return mpiddp's {kind.__name__}, got {type(found).__name__}")
    return found
