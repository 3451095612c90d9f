"""``load_callable``: what ``--model`` and ``--data`` name as MODULE:CALLABLE."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .options import UsageError, nearest


def load_callable(option: str, name: str) -> Callable[..., Any]:
    """Import a module and return a callable of it.

    Parameters
    ----------
    option : str
        Where the name was given, for the error's text: ``--model``.
    name : str
        ``package.module:callable``; the working directory is searched too.

    Raises
    ------
    UsageError
        If there is no such module, or no such callable in it. What the module raises itself while it is imported goes
        on to the caller.

    Examples
    --------
    >>> load_callable("--model", "math:sqrt")(4)
    2.0
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # the console script's path lacks it, that of python -m has it
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise UsageError(
            f"{option} {name}: there is no module {module_name} ({error}), neither here nor installed"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        wrong = "is no callable" if hasattr(module, attribute) else f"is not in {module_name}"
        raise UsageError(f"{option} {name}: {attribute!r} {wrong}{nearest(attribute, vars(module))}")
    return found  # type: ignore[no-any-return]
