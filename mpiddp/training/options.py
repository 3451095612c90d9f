"""Fields of a dataclass as options of a command line and keys of a TOML file, by the standard library only."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class UsageError(Exception):
    """A request that cannot be fulfilled; rank 0 alone prints its text, one line."""

    exit_code = 2


class RunError(UsageError):
    """A failure of a run that all ranks know of and that needs no traceback."""

    exit_code = 1


class Range(NamedTuple):
    expected: str
    """The words after "has to be" in an error."""
    holds: Callable[[Any], bool]


AT_LEAST_0 = Range("at least 0", lambda value: 0 <= value < math.inf)
AT_LEAST_1 = Range("at least 1", lambda value: 1 <= value < math.inf)
POSITIVE = Range("positive", lambda value: 0 < value < math.inf)
SHARE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)

_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}


class Kind(NamedTuple):
    wanted: type
    optional: bool


def option(
    default: Any,
    table: str,
    text: str,
    *choices: str,
    metavar: str | None = None,
    within: Range | None = None,
) -> Any:
    """Make a dataclass field an option; ``table`` is its group in ``--help``."""
    metadata = {"table": table, "help": text, "choices": choices, "metavar": metavar, "within": within}
    return dataclasses.field(default=default, metadata=metadata)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` if a known name is near; else "".

    >>> nearest("epoch", ["lr", "epochs"])
    '; did you mean epochs?'
    """
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def kinds(cls: type) -> dict[str, Kind]:
    found = {}
    for name, hint in typing.get_type_hints(cls).items():
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        found[name] = Kind(typing.get_origin(parts[0]) or parts[0], type(None) in parts)
    return found


def check(values: Any) -> None:
    for each in dataclasses.fields(values):
        value, within, choices = getattr(values, each.name), each.metadata["within"], each.metadata["choices"]
        if choices and value not in choices:
            raise UsageError(
                f"{flag(each.name)} has to be one of {', '.join(choices)}, got {value!r}{nearest(str(value), choices)}"
            )
        if within and value is not None and not within.holds(value):
            raise UsageError(f"{flag(each.name)} has to be {within.expected}, got {value}")


def from_mapping(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dataclass's arguments from plain values; the UsageError for an unknown key names the nearest one."""
    wanted = kinds(cls)
    for key in values:
        if key not in wanted:
            raise UsageError(f"unknown configuration key {key!r}{nearest(key, wanted)}")
    return {key: _converted(key, value, wanted[key]) for key, value in values.items()}


def _converted(key: str, value: Any, kind: Kind) -> Any:
    """Check the type of a value; an int is taken as a float, and a string as a path."""
    if value is None and kind.optional:
        return None
    if kind.wanted is Path and isinstance(value, str | Path) and value != "":
        return Path(value)
    if kind.wanted is float and type(value) is int:
        return float(value)
    if type(value) is not kind.wanted:
        raise UsageError(f"configuration key {key!r} has to be {_KINDS[kind.wanted]}, got {value!r}")
    return value


def add_options(parser: argparse.ArgumentParser, cls: Any) -> None:
    """Add an option for each field; those that are not given stay out of the namespace."""
    parser.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="TOML file of the names below (batch_size = 128); the command line overrides it",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    wanted = kinds(cls)
    for each in dataclasses.fields(cls):
        kind, metadata = wanted[each.name].wanted, each.metadata
        table, choices = metadata["table"], metadata["choices"]
        if table not in groups:
            groups[table] = parser.add_argument_group(table)
        how: dict[str, Any]
        if kind is bool:
            state = " (default: yes)" if each.default else ""
            how = {"action": argparse.BooleanOptionalAction}
        else:
            state = "" if each.default is None else f" (default: {each.default})"
            how = {"type": _reader(kind)}
            how |= {"choices": choices} if choices else {"metavar": metadata["metavar"] or kind.__name__.upper()}
        text = (metadata["help"] + state).replace("%", "%%")
        groups[table].add_argument(flag(each.name), default=argparse.SUPPRESS, help=text, **how)


def _reader(wanted: type) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        try:
            if wanted is Path and not word:
                raise ValueError("Path takes it for the working directory")
            return wanted(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"has to be {_KINDS[wanted]}, got {word!r}") from None

    return read


def read_options(arguments: argparse.Namespace, cls: Any) -> dict[str, Any]:
    """Return a dataclass's arguments from ``--config`` and the command line; UsageError as in `from_mapping`."""
    given = vars(arguments)
    values: dict[str, Any] = {}
    if "config" in given:
        try:
            values = from_mapping(cls, tomllib.loads(given["config"].read_text()))
        except (OSError, ValueError) as error:
            raise UsageError(f"--config {given['config']}: {error}") from error
    return values | from_mapping(cls, {name: given[name] for name in kinds(cls) if name in given})
