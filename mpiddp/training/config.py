"""``Config``: the configuration of a training run. Its fields are the command line's options and the TOML file's keys.

The module and those that it imports use the standard library only, because the command line is parsed before NumPy may
be imported.
"""
# ruff: noqa: RUF009 (`option` returns a dataclass field)

import argparse
import contextlib
import dataclasses
import json
import tomllib
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .options import AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE, UsageError, flag, nearest, option, refusing
from .stop import parse_duration

MODELS = ("net", "mlp", "resnet")
DATA = ("digits", "mnist", "synthetic")
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine")

_MOST_BYTES = 100_000_000
"""The length in bytes that the header of a safetensors file may have."""

ALONE = "is on that rank alone, and would die with it; use --resume auto after a death"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a training run; UsageError if a value is out of range or two options contradict each other.

    Each field is an option of ``python -m mpiddp train`` (``batch_size`` is ``--batch-size``), and a key of the TOML
    file that ``--config`` names. The command line overrides the file.

    Examples
    --------
    >>> Config(epochs=10, momentum=0.5).batch_size
    64
    """

    model: str = option(
        "net",
        "the tutorial's network (net), a perceptron (mlp), a residual network with batch norm (resnet), or"
        " MODULE:CALLABLE, which returns a Module when called without arguments",
        begins="network",
    )
    dropout: float | None = option(
        None,
        "probability with which a unit is left out in training (default: 0.5 of net and mlp, 0 of resnet)",
        within=SHARE,
    )
    sync_batchnorm: bool = option(False, "batch norms take mean and variance over the batches of all ranks")

    data: str = option(
        "digits",
        "1,797 digits that come with the package (digits), MNIST from --data-dir (mnist), made-up"
        " images (synthetic), npz:FILE, or MODULE:CALLABLE, called with train=True and train=False",
        begins="input",
    )
    data_dir: Path | None = option(None, "folder of MNIST's four IDX files, gzipped or not", metavar="DIR")
    batch_size: int = option(64, "samples a batch, over all ranks together", within=AT_LEAST_1)
    workers: int = option(0, "threads of each rank that fetch batches ahead; 0: none", within=AT_LEAST_0)

    optimizer: str = option(
        "sgd",
        "what makes a step of gradients: sgd, adam, adamw or MODULE:CALLABLE, called with params and lr",
        begins="optimization",
    )
    lr: float = option(0.01, "learning rate", within=POSITIVE)
    momentum: float = option(0.9, "share of the previous update that goes on; Adam's first beta", within=SHARE)
    weight_decay: float = option(
        0.0,
        "times each parameter, added to its gradient; with adamw: taken off the parameter itself",
        within=AT_LEAST_0,
    )
    zero: bool = option(False, "each rank updates its share of the parameters, and holds their optimizer state")
    accumulate: int = option(1, "batches whose gradients make one step", within=AT_LEAST_1)
    clip_norm: float | None = option(None, "limit of the norm of all gradients together", within=POSITIVE)
    schedule: str = option(
        "constant",
        "how the learning rate goes on after the warm-up: constant, half a cosine to 0 at the end (cosine), or"
        " MODULE:CALLABLE, called with optimizer, steps and steps_an_epoch, which returns an LRScheduler",
    )
    warmup_steps: int = option(0, "steps in which the learning rate grows to --lr", within=AT_LEAST_0)

    average: str = option(
        "ddp",
        "average gradients in buckets during backward (ddp), or MODULE:CALLABLE, called with module, which returns a"
        " DistributedDataParallel of it with options or a communication hook of yours",
        begins="ddp",
    )
    virtual_ranks: int | None = option(
        None,
        "divide each batch into this number of micro-batches, which the ranks share: the model gets the same bits on"
        " any number of ranks up to it",
        within=AT_LEAST_1,
    )

    epochs: int = option(20, "passes over the training data", within=AT_LEAST_1, begins="run")
    seed: int = option(0, "fixes initial values, split, order of samples and dropout", within=AT_LEAST_0)
    device: str = option("auto", "where arrays live; auto: on GPUs where every rank has one", "auto", "cpu", "cuda")
    on_nan: str = option(
        "stop",
        "in a step whose loss or gradients are not finite, stop the run with exit code 1, or leave the step out: until"
        " all steps of an epoch, or 100 in a row, were left out, which stops it too",
        *("stop", "skip"),
    )
    max_time: str | None = option(
        None,
        "stop with a checkpoint and exit code 75 before this time since the start is over, in seconds or H:MM:SS;"
        " slurm: before the end of the Slurm job",
        metavar="TIME",
    )
    spares: int = option(
        0,
        "ranks, the last ones, that wait to take the places of dead ones, under Open MPI's mpirun --with-ft ulfm",
        within=AT_LEAST_0,
    )
    margin: float = option(30.0, "seconds to leave for the checkpoint before --max-time", within=AT_LEAST_0)

    metrics: Path | None = option(None, "write one JSON line per epoch to this file", metavar="FILE", begins="files")
    output: Path | None = option(
        None, "save model, configuration, metrics and checkpoints in this folder", metavar="DIR"
    )
    resume: str = option(
        "no", "auto goes on from the newest whole checkpoint in --output, if there is one", "no", "auto"
    )
    checkpoint_steps: int = option(
        0, "steps between checkpoints, besides those after every epoch; 0 is none", within=AT_LEAST_0
    )
    keep: int = option(3, "newest checkpoints to keep; the most accurate one stays besides", within=AT_LEAST_1)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, within = getattr(self, each.name), each.metadata["within"]
            if within and value is not None and not within.holds(value):
                raise UsageError(f"{flag(each.name)} has to be {within.expected}, got {value}")
        names = {"model": MODELS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "average": ("ddp",), "data": DATA}
        for name, known in names.items():
            _check_name(name, getattr(self, name), known)
        if self.max_time is not None:
            parse_duration(self.max_time)
        for wrong, said in self._contradictions():
            if wrong:
                raise UsageError(said)

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        no_folder, spares, virtual = self.output is None, self.spares > 0, self.virtual_ranks
        yield no_folder and self.resume != "no", f"--resume {self.resume} needs --output DIR, the folder of the run"
        yield no_folder and self.checkpoint_steps > 0, "--checkpoint-steps needs --output DIR, where they are saved"
        yield no_folder and bool(self.max_time), "--max-time stops with a checkpoint: give --output DIR, its place"
        no_files = self.data == "mnist" and self.data_dir is None
        yield no_files, "--data mnist needs --data-dir DIR, the folder of MNIST's four IDX files"
        own = ":" in self.model and self.dropout is not None
        yield own, "--dropout is for the models that have a name here, not for one's own"
        for name in ("momentum", "weight_decay"):
            changed = getattr(self, name) != type(self).__dataclass_fields__[name].default
            yield ":" in self.optimizer and changed, f"{flag(name)} is for the optimizers that have a name here"
        yield spares and self.zero, f"--spares: with --zero a rank's part of the optimizer state {ALONE}"
        yield spares and self.device == "cuda", "--spares: ranks on GPUs cannot go on after a death; use --resume auto"
        if virtual is None:
            return
        several = "--accumulate: a step with --virtual-ranks is micro-batches already; give a larger --batch-size and"
        yield self.accumulate > 1, f"{several} more of them"
        yield self.average != "ddp", "--virtual-ranks is an option of --average ddp"
        yield self.device == "cuda", "--virtual-ranks: libraries of GPUs add in an order of their own"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as values for JSON. Fields without a value are None."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}


_KINDS = {name: (typing.get_args(hint) or (hint,))[0] for name, hint in typing.get_type_hints(Config).items()}
"""The type of each option's value, without the None of options that have no default."""


def _path(text: str) -> Path:
    if not text:  # Path("") is the working directory
        raise argparse.ArgumentTypeError("a path has to be given, got ''")
    return Path(text)


def _check_name(name: str, value: str, names: Iterable[str]) -> None:
    form = "npz:FILE or MODULE:CALLABLE" if name == "data" else "MODULE:CALLABLE"
    if value not in names and ":" not in value:
        raise UsageError(f"{flag(name)} has to be {', '.join(names)}, {form}, got {value!r}{nearest(value, names)}")
    if ":" in value and not all(value.partition(":")):
        raise UsageError(f"{flag(name)} {value!r} has an empty part: give {form} without gaps")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and an option for each field. The namespace gets only the options that the user gives."""
    parser.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="TOML file of the names below (batch_size = 128); the command line overrides it",
    )
    for each in dataclasses.fields(Config):
        kind, metadata = _KINDS[each.name], each.metadata
        if metadata["begins"]:
            group = parser.add_argument_group(metadata["begins"])
        if kind is bool:
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            usual = "NAME" if kind is str else kind.__name__.upper()
            how = {"type": _path if kind is Path else kind, "choices": metadata["choices"] or None}
            how["metavar"] = None if metadata["choices"] else metadata["metavar"] or usual
        state = "" if kind is bool or each.default is None else f" (default: {each.default})"
        text = (metadata["help"] + state).replace("%", "%%")
        group.add_argument(flag(each.name), default=argparse.SUPPRESS, help=text, **how)


def read_options(arguments: argparse.Namespace) -> "Config":
    """Return the `Config` of a parsed command line and of the TOML file that its ``--config`` names."""
    given = vars(arguments)
    if "config" in given:
        words, parser = [], argparse.ArgumentParser(exit_on_error=False)
        add_options(parser)
        with refusing(f"--config {given['config']}: ", OSError, ValueError, argparse.ArgumentError):
            for key, value in tomllib.loads(given["config"].read_text()).items():
                if key not in _KINDS:
                    raise ValueError(f"unknown configuration key {key!r}{nearest(key, _KINDS)}")
                switch = _KINDS[key] is bool and isinstance(value, bool)
                words.append(flag(key if value else f"no_{key}") if switch else f"{flag(key)}={value}")
            given = vars(parser.parse_args(words)) | given
    return Config(**{name: given[name] for name in _KINDS if name in given})


def resumed_threads(output: Path, ranks: int) -> int | None:
    """Return the number of BLAS threads a run had at its newest checkpoint. The number decides the order of sums.

    None if there is no checkpoint, if it does not record the number, or if it was made on another number of ranks:
    the resumed run then gives other bits anyway. With ``--virtual-ranks``, where this is not so, nothing calls this.
    """
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # `Checkpointer` reports a folder that cannot be read
        paths = sorted(output.glob("checkpoints/step-??????????.safetensors"), reverse=True)
    for path in paths:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            bits = saved_state(path)["state"]["bits"]
            threads = bits["BLAS threads"]
            return int(threads) if bits["ranks"] == ranks and threads is not None else None
    return None


def saved_state(path: Path) -> Any:
    """Return the state in a file of `mpiddp.save`, with the names of arrays in place of arrays, without NumPy.

    OSError, ValueError, KeyError or TypeError if the file holds no state. A safetensors file begins with the length of
    its header, in 8 bytes, and the header, in JSON.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(json.loads(file.read(min(length, _MOST_BYTES)))["__metadata__"]["mpiddp.state"])
