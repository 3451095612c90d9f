"""Import and call what the user names as MODULE:CALLABLE. Its errors become one line that names the source line."""

import importlib
import os
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any

from .options import UsageError, nearest

_NOT_THEIRS = (f"{Path(__file__).parents[1]}{os.sep}", pkgutil.__file__, str(importlib.__file__), "<frozen ")
"""Prefixes of file names. Stack frames in these files are not the user's code, so error messages do not name them."""


def call(option: str, name: str, kind: type[Any], **arguments: Any) -> Any:
    """Call ``package.module:callable``; UsageError if the call fails, or if its result is not a ``kind``.

    Modules in the working directory are found, too.

    >>> call("--data", "random:Random", object, x=3).randrange(1)
    0
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # the console script's sys.path lacks the working directory
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
