"""``Config``: what a training run can be told. The command line and the TOML file are made from its fields.

Imports the standard library only: it is read before NumPy may be imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """What the user has asked for cannot be done; the text says it in one line, and rank 0 alone prints it."""

    exit_code = 2


class RunError(UsageError):
    """A run has failed in a way that all ranks know of and that needs no traceback."""

    exit_code = 1


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` where one of the known names is near, else nothing."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _option(text: str, *choices: str, metavar: str | None = None) -> dict[str, Any]:
    """Describe a field as an option of the command line."""
    return {"help": text, "choices": choices, "metavar": metavar}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a training run.

    Every field is an option of ``python -m mpiddp train`` (``batch_size`` is ``--batch-size``) and a key of a TOML file
    given by ``--config``, whose values the command line overrides.

    Raises
    ------
    UsageError
        If a value is outside of its range.

    Examples
    --------
    >>> Config(epochs=10, momentum=0.5).batch_size
    64
    """

    model: str = field(default="net", metadata=_option("the tutorial's network, or a perceptron", "net", "mlp"))
    data: str = field(
        default="digits",
        metadata=_option(
            "1,797 digits that come with the package, MNIST from --data-dir, or made-up images",
            *("digits", "mnist", "synthetic"),
        ),
    )
    data_dir: Path | None = field(
        default=None, metadata=_option("folder of MNIST's four IDX files, gzipped or not", metavar="DIR")
    )
    download: bool = field(
        default=False, metadata=_option("fetch MNIST's files into --data-dir where they are missing (needs pooch)")
    )
    epochs: int = field(default=20, metadata=_option("passes over the training data"))
    batch_size: int = field(default=64, metadata=_option("samples a step, over all ranks together"))
    lr: float = field(default=0.01, metadata=_option("learning rate"))
    momentum: float = field(default=0.9, metadata=_option("share of the previous update that goes on"))
    dropout: float = field(default=0.5, metadata=_option("probability with which a unit is left out in training"))
    seed: int = field(default=0, metadata=_option("fixes initial values, split, order of samples and dropout"))
    device: str = field(
        default="auto",
        metadata=_option("where arrays live; this version trains on the host only", "auto", "cpu", "cuda"),
    )
    average: str = field(
        default="ddp",
        metadata=_option("average gradients in buckets during backward, or one by one after it", "ddp", "naive"),
    )
    on_nan: str = field(
        default="stop", metadata=_option("what to do in a step whose loss or gradients are not finite", "stop", "skip")
    )
    metrics: Path | None = field(
        default=None, metadata=_option("write one JSON line per epoch to this file", metavar="FILE")
    )
    timeline: Path | None = field(
        default=None,
        metadata=_option("write what every rank did when to this file, for ui.perfetto.dev", metavar="FILE"),
    )
    output: Path | None = field(
        default=None,
        metadata=_option("save model, configuration, metrics and checkpoints in this folder", metavar="DIR"),
    )
    log_ranks: bool = field(default=False, metadata=_option("write a log file for every rank in --output"))
    resume: str = field(
        default="no",
        metadata=_option("auto goes on from the newest whole checkpoint in --output, if there is one", "no", "auto"),
    )
    checkpoint_steps: int = field(
        default=0, metadata=_option("steps between checkpoints, besides those after every epoch; 0 is none")
    )
    keep: int = field(default=3, metadata=_option("newest checkpoints to keep; the most accurate one stays besides"))

    def __post_init__(self) -> None:
        for name, fine, expected in (
            ("epochs", self.epochs >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("lr", 0 < self.lr < float("inf"), "positive"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("seed", self.seed >= 0, "at least 0"),
            ("checkpoint_steps", self.checkpoint_steps >= 0, "at least 0"),
            ("keep", self.keep >= 1, "at least 1"),
        ):
            if not fine:
                raise UsageError(f"{_flag(name)} has to be {expected}, got {getattr(self, name)}")
        for each in dataclasses.fields(self):
            choices = each.metadata["choices"]
            if choices and getattr(self, each.name) not in choices:
                raise UsageError(
                    f"{_flag(each.name)} has to be one of {', '.join(choices)}, got {getattr(self, each.name)!r}"
                )
        if self.resume != "no" and self.output is None:
            raise UsageError(f"--resume {self.resume} needs --output DIR, the folder of the run to go on with")
        if self.log_ranks and self.output is None:
            raise UsageError("--log-ranks needs --output DIR, the folder to write the files in")
        if self.timeline is not None and self.average != "ddp":
            raise UsageError("--timeline FILE shows buckets, which --average naive has none of; leave one out")
        if self.data == "mnist" and self.data_dir is None:
            raise UsageError("--data mnist needs --data-dir DIR, the folder of MNIST's four IDX files")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Make a configuration of plain values, such as those of a TOML or JSON file.

        Raises
        ------
        UsageError
            If a key is unknown (the text names the nearest one that is), or a value is of another type.
        """
        kinds = _kinds()
        for key in values:
            if key not in kinds:
                raise UsageError(f"unknown configuration key {key!r}{nearest(key, kinds)}")
        return cls(**{key: _converted(key, value, kinds[key]) for key, value in values.items()})

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON and TOML know; those that are not set as None."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}

    def as_json(self) -> str:
        """Return `as_dict` as the text of a JSON file."""
        return json.dumps(self.as_dict(), indent=1) + "\n"


def _flag(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + name.replace("_", "-")


def _kinds() -> dict[str, tuple[type, bool]]:
    """Return the type of every field, and whether it may be None."""
    kinds = {}
    for name, hint in typing.get_type_hints(Config).items():
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[name] = (parts[0], type(None) in parts)
    return kinds


def _converted(key: str, value: Any, kind: tuple[type, bool]) -> Any:
    """Return a plain value as a field's type: an int serves as a float, a string as a path."""
    wanted, optional = kind
    if value is None and optional:
        return None
    if wanted is Path and isinstance(value, str):
        return Path(value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted and not (wanted is Path and isinstance(value, Path)):
        raise UsageError(f"configuration key {key!r} has to be a {wanted.__name__}, got {value!r}")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and an option for every field; what is not given stays out of the parsed namespace."""
    parser.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="TOML file of the names below (batch_size = 128); the command line overrides it",
    )
    kinds = _kinds()
    for each in dataclasses.fields(Config):
        kind, _ = kinds[each.name]
        if kind is bool:
            parser.add_argument(
                _flag(each.name), action="store_true", default=argparse.SUPPRESS, help=each.metadata["help"]
            )
            continue
        default = "" if each.default is None else f" (default: {each.default})"
        parser.add_argument(
            _flag(each.name),
            type=kind,
            default=argparse.SUPPRESS,
            choices=each.metadata["choices"] or None,
            metavar=each.metadata["metavar"] or (None if each.metadata["choices"] else kind.__name__.upper()),
            help=each.metadata["help"] + default,
        )


def read_options(arguments: argparse.Namespace) -> Config:
    """Return the configuration of a parsed command line (see `add_options`).

    Raises
    ------
    UsageError
        If the file cannot be read, or a key or a value is wrong.
    """
    given = vars(arguments)
    values: dict[str, Any] = {}
    if "config" in given:
        try:
            values = tomllib.loads(given["config"].read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"--config {given['config']}: {error}") from error
    values |= {name: given[name] for name in _kinds() if name in given}
    return Config.from_mapping(values)
