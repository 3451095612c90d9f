"""Callables that the user names as MODULE:CALLABLE: they are imported and called, and their errors are one sentence."""

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .options import UsageError, nearest


def import_string(option: str, name: str) -> Callable[..., Any]:
    """Return the callable ``package.module:callable``; the working directory is searched too; UsageError.

    >>> import_string("--model", "math:sqrt")(4)
    2.0
    """
    module_name, _, attribute = name.partition(":")
    if module_name.startswith("."):
        raise UsageError(
            f"{option} {name}: {module_name!r} is no name of a module; give it as in `import`, without path and .py"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # sys.path of the console script lacks it
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
        if hasattr(module, attribute):
            raise UsageError(f"{option} {name}: {attribute!r} is no callable, it is of type {type(found).__name__}")
        raise UsageError(f"{option} {name}: {attribute!r} is not in {module_name}{nearest(attribute, vars(module))}")
    return found  # type: ignore[no-any-return]


def call(option: str, name: str, kind: type[Any], **arguments: Any) -> Any:
    """Call what `import_string` returns; UsageError if it raises, or returns something else than a ``kind``.

    >>> call("--data", "random:Random", object, x=3).randrange(1)
    0
    """
    function = import_string(option, name)
    try:
        found = function(**arguments)
    except Exception as error:
        home = str(Path(__file__).parents[1])
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(home)]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        raise UsageError(f"{option} {name}: {type(error).__name__}: {error}{notes}{at}") from error
    if not isinstance(found, kind):
        raise UsageError(f"{option} {name} has to return mpiddp's {kind.__name__}, got {type(found).__name__}")
    return found
