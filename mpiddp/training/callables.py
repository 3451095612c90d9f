"""``load_callable``, ``call`` and ``attempt``: what ``--model`` and ``--data`` name as MODULE:CALLABLE."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .options import UsageError, nearest

_Result = TypeVar("_Result")


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
        if hasattr(module, attribute):
            raise UsageError(f"{option} {name}: {attribute!r} is no callable, it is of type {type(found).__name__}")
        raise UsageError(f"{option} {name}: {attribute!r} is not in {module_name}{nearest(attribute, vars(module))}")
    return found  # type: ignore[no-any-return]


def call(option: str, name: str, **arguments: Any) -> Any:
    """Return what the callable of a name returns.

    Parameters
    ----------
    option, name : str
        See `load_callable`.
    **arguments
        What it is called with.

    Raises
    ------
    UsageError
        As `load_callable`; and if it does not take these arguments, or raises something itself.

    Examples
    --------
    >>> call("--data", "random:Random", x=3).randrange(1)
    0
    """
    function = load_callable(option, name)
    try:
        signature = inspect.signature(function)
    except ValueError:
        signature = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)])  # written in C
    try:
        signature.bind(**arguments)
    except TypeError as error:
        shown = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise UsageError(
            f"{option} {name} is called as {name.partition(':')[2]}({shown}), and has the parameters {signature}:"
            f" {error}"
        ) from error
    return attempt(lambda: function(**arguments), f"{option} {name}")


def attempt(action: Callable[[], _Result], said: str) -> _Result:
    """Return what an action returns, which runs a user's code.

    Raises
    ------
    UsageError
        If it raises something: ``said``, the error, and the place in the user's code, in one line for all ranks.
    """
    try:
        return action()
    except UsageError:
        raise
    except Exception as error:
        home = str(Path(__file__).parents[1])
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(home)]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        raise UsageError(f"{said}: {type(error).__name__}: {error}{notes}{at}") from error
