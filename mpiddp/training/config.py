"""``Config``: the configuration of a training run, made into a command line and the keys of a TOML file.

Imports the standard library only, because it is read before NumPy may be imported.
"""
# ruff: noqa: RUF009 (option makes a field)

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import options
from .options import AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE, option
from .options import RunError as RunError
from .options import UsageError as UsageError
from .options import nearest as nearest
from .stop import parse_duration

MODELS = ("net", "mlp", "resnet", "transformer")
DATA = ("digits", "mnist", "synthetic")
FILES = ("npy", "npz", "idx")
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine")
AVERAGES = ("ddp", "local")

_OTHER_WORDS = {
    "model": "network arch",
    "dropout": "drop_rate",
    "sync_batchnorm": "sync_bn",
    "data": "dataset",
    "context": "window block_size sequence_length",
    "batch_size": "bs",
    "workers": "num_workers",
    "optimizer": "optim beta2",
    "lr": "learning_rate rate",
    "momentum": "beta1",
    "weight_decay": "wd l2",
    "zero": "zero_redundancy",
    "accumulate": "gradient_accumulation_steps accumulation_steps accumulate_grad_batches",
    "clip_norm": "max_norm max_grad_norm clip_grad_norm gradient_clipping",
    "schedule": "scheduler lr_schedule lr_min eta_min min_lr decay gamma decay_epochs step_size",
    "warmup_steps": "warmup",
    "average": "bucket_cap_mb bucket_cap_mb_list find_unused_parameters skip_all_reduce_unused_params static_graph"
    " gradient_as_bucket_view broadcast_buffers forward_sync_buffers init_sync fragments outer_lr outer_momentum"
    " local_start",
    "virtual_ranks": "num_shards logical_ranks",
    "period": "sync_every",
    "compress": "compression comm_hook dtype precision amp mixed_precision loss_scale",
    "epochs": "num_epochs n_epochs",
    "seed": "random_seed manual_seed",
    "max_time": "time_limit deadline",
    "spares": "hot_spares spare_ranks",
    "output": "output_dir out_dir save_dir",
    "checkpoint_steps": "save_steps",
}
OTHER_WORDS = {word: name for name, words in _OTHER_WORDS.items() for word in words.split()}
"""What other programs call an option, for suggestions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a training run; UsageError for values out of range or in contradiction.

    A field is an option of ``python -m mpiddp train`` (``batch_size`` is ``--batch-size``), and a key of ``--config``'s
    TOML file, at its top or in the field's table; the command line overrides the file.

    Examples
    --------
    >>> Config(epochs=10, momentum=0.5).batch_size
    64
    """

    model: str = option(
        "net",
        "network",
        "the tutorial's network (net), a perceptron (mlp), a residual network with batch norm (resnet), a"
        " transformer for text, or MODULE:CALLABLE, which returns a Module when called without arguments",
        metavar="NAME",
    )
    dropout: float | None = option(
        None,
        "network",
        "probability with which a unit is left out in training (default: 0.5 of net and mlp, 0 of resnet, 0.1 of"
        " transformer)",
        within=SHARE,
    )
    sync_batchnorm: bool = option(False, "network", "batch norms take mean and variance over the batches of all ranks")

    data: str = option(
        "digits",
        "input",
        "1,797 digits that come with the package (digits), MNIST from --data-dir (mnist), made-up"
        " images (synthetic), text:FILE, npy:, npz: or idx:FILE[,FILE], or MODULE:CALLABLE, called with"
        " train=True and train=False",
        metavar="NAME",
    )
    data_dir: Path | None = option(None, "input", "folder of MNIST's four IDX files, gzipped or not", metavar="DIR")
    context: int = option(64, "input", "bytes of text in a sample", within=AT_LEAST_1)
    batch_size: int = option(64, "input", "samples a batch, over all ranks together", within=AT_LEAST_1)
    workers: int = option(0, "input", "threads of each rank that fetch batches ahead; 0: none", within=AT_LEAST_0)

    optimizer: str = option(
        "sgd",
        "optimization",
        "what makes a step of gradients: sgd, adam, adamw or MODULE:CALLABLE, called with params and lr",
        metavar="NAME",
    )
    lr: float = option(0.01, "optimization", "learning rate", within=POSITIVE)
    momentum: float = option(
        0.9, "optimization", "share of the previous update that goes on; Adam's first beta", within=SHARE
    )
    weight_decay: float = option(
        0.0,
        "optimization",
        "times each parameter, added to its gradient; with adamw: taken off the parameter itself",
        within=AT_LEAST_0,
    )
    zero: bool = option(
        False, "optimization", "each rank updates its share of the parameters, and holds their optimizer state"
    )
    accumulate: int = option(1, "optimization", "batches whose gradients make one step", within=AT_LEAST_1)
    clip_norm: float | None = option(
        None, "optimization", "limit of the norm of all gradients together", within=POSITIVE
    )
    schedule: str = option(
        "constant",
        "optimization",
        "how the learning rate goes on after the warm-up: constant, half a cosine to 0 at the end (cosine), or"
        " MODULE:CALLABLE, called with optimizer, steps and steps_an_epoch, which returns an LRScheduler",
        metavar="NAME",
    )
    warmup_steps: int = option(0, "optimization", "steps in which the learning rate grows to --lr", within=AT_LEAST_0)

    average: str = option(
        "ddp",
        "ddp",
        "average gradients in buckets during backward (ddp), or parameters every --period steps (local: DiLoCo); or"
        " MODULE:CALLABLE, called with module, which returns a DistributedDataParallel of it, or a DiLoCo of its"
        " parameters",
        metavar="NAME",
    )
    virtual_ranks: int | None = option(
        None,
        "ddp",
        "divide each batch into this number of micro-batches, which the ranks share: the model gets the same bits on"
        " any number of ranks up to it",
        within=AT_LEAST_1,
    )
    period: int = option(50, "ddp", "steps from one average of the parameters to the next", within=AT_LEAST_1)
    compress: str = option(
        "none",
        "ddp",
        "send gradients in half precision, or as matrices of low rank",
        *("none", "fp16", "bf16", "powersgd", "batched-powersgd"),
    )
    powersgd_rank: int = option(1, "ddp", "rank of PowerSGD's matrices", within=AT_LEAST_1)
    powersgd_start: int = option(
        1000, "ddp", "steps before PowerSGD compresses", within=options.Range("at least 2", lambda n: n >= 2)
    )

    epochs: int = option(20, "run", "passes over the training data", within=AT_LEAST_1)
    seed: int = option(0, "run", "fixes initial values, split, order of samples and dropout", within=AT_LEAST_0)
    device: str = option(
        "auto", "run", "where arrays live; auto: on GPUs where every rank has one", "auto", "cpu", "cuda"
    )
    on_nan: str = option(
        "stop",
        "run",
        "in a step whose loss or gradients are not finite, stop the run with exit code 1, or leave the step out: until"
        " all steps of an epoch, or 100 in a row, were left out, which stops it too",
        *("stop", "skip"),
    )
    max_time: str | None = option(
        None,
        "run",
        "stop with a checkpoint and exit code 75 before this time since the start is over, in seconds or H:MM:SS;"
        " slurm: before the end of the Slurm job",
        metavar="TIME",
    )
    spares: int = option(
        0,
        "run",
        "ranks, the last ones, that wait to take the places of dead ones, under Open MPI's mpirun --with-ft ulfm",
        within=AT_LEAST_0,
    )
    margin: float = option(30.0, "run", "seconds to leave for the checkpoint before --max-time", within=AT_LEAST_0)

    metrics: Path | None = option(None, "files", "write one JSON line per epoch to this file", metavar="FILE")
    output: Path | None = option(
        None, "files", "save model, configuration, metrics and checkpoints in this folder", metavar="DIR"
    )
    resume: str = option(
        "no", "files", "auto goes on from the newest whole checkpoint in --output, if there is one", "no", "auto"
    )
    checkpoint_steps: int = option(
        0, "files", "steps between checkpoints, besides those after every epoch; 0 is none", within=AT_LEAST_0
    )
    keep: int = option(3, "files", "newest checkpoints to keep; the most accurate one stays besides", within=AT_LEAST_1)

    def __post_init__(self) -> None:
        options.check(self)
        for name, known in (
            ("model", MODELS),
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("average", AVERAGES),
        ):
            _check_name(f"--{name}", getattr(self, name), known, "MODULE:CALLABLE")
        _check_name("--data", self.data, DATA, "text:FILE, npy:, npz: or idx:FILE[,FILE] or MODULE:CALLABLE")
        if self.max_time is not None:
            parse_duration(self.max_time)
        refuse(self._contradictions())

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        files = self.output is None
        yield files and self.resume != "no", f"--resume {self.resume} needs --output DIR, the folder of the run"
        yield files and self.checkpoint_steps > 0, "--checkpoint-steps needs --output DIR, the folder to save them in"
        yield files and self.max_time is not None, "--max-time stops with a checkpoint: give --output DIR, its place"
        yield (
            self.data == "mnist" and self.data_dir is None,
            ("--data mnist needs --data-dir DIR, the folder of MNIST's four IDX files"),
        )
        text = self.data.startswith("text:")
        yield (
            text and self.model in ("net", "mlp", "resnet"),
            (f"--data {self.data} is text, which --model {self.model} cannot read: take --model transformer"),
        )
        own = ":" in self.model and self.dropout is not None
        yield own, "--dropout is for the models that have a name here, not for one's own"
        yield (
            self.model == "transformer" and (self.data in DATA or self.data.partition(":")[0] in FILES),
            (f"--model transformer reads text, and --data {self.data} is images: give --data text:FILE"),
        )
        for name in ("momentum", "weight_decay"):
            changed = getattr(self, name) != type(self).__dataclass_fields__[name].default
            yield ":" in self.optimizer and changed, f"{options.flag(name)} is for the optimizers that have a name here"
        local = self.average == "local"
        changed = self.period != type(self).__dataclass_fields__["period"].default
        yield not local and changed, "--period is an option of --average local"
        yield from local_contradictions(self) if local else ()
        own = ":" in self.average
        yield own and self.compress != "none", "--compress is for --average ddp; register a hook in your callable"
        spares = self.spares > 0
        yield spares and self.zero, f"--spares: with --zero a rank's part of the optimizer state {_ALONE}"
        if self.virtual_ranks is not None:
            yield (
                self.batch_size < self.virtual_ranks,
                (
                    f"--batch-size {self.batch_size} cannot be divided among --virtual-ranks {self.virtual_ranks}: give"
                    " as many samples or more"
                ),
            )
            yield (
                self.accumulate > 1,
                (
                    "--accumulate: a step with --virtual-ranks is micro-batches already; give a larger --batch-size and"
                    " more of them"
                ),
            )
            yield self.average != "ddp", "--virtual-ranks is an option of --average ddp"
            yield self.compress != "none", "--compress: compressed sums depend on the ranks, against --virtual-ranks"
            yield (
                self.sync_batchnorm,
                ("--sync-batchnorm needs all micro-batches at once: --virtual-ranks has each normalized by itself"),
            )
            yield self.device == "cuda", "--virtual-ranks: libraries of GPUs add in an order of their own"
        yield from powersgd_contradictions(self) if "powersgd" in self.compress else ()
        yield spares and self.device == "cuda", "--spares: ranks on GPUs cannot go on after a death; use --resume auto"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Make a configuration of plain values, as from TOML or JSON; UsageError for unknown keys and wrong types."""
        return cls(**options.from_mapping(cls, values, OTHER_WORDS))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as values for JSON and TOML; those not set as None."""
        return {key: _plain(value) for key, value in vars(self).items()}

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return `as_dict` in the tables of a TOML file."""
        found: dict[str, dict[str, Any]] = {}
        for each in dataclasses.fields(self):
            found.setdefault(each.metadata["table"], {})[each.name] = _plain(getattr(self, each.name))
        return found

    def as_json(self) -> str:
        """Return `as_dict` as the text of a JSON file."""
        return json.dumps(self.as_dict(), indent=1) + "\n"


_ALONE = "is on that rank alone, and would die with it; use --resume auto after a death"


def local_contradictions(config: Config) -> Iterable[tuple[bool, str]]:
    yield config.compress != "none", "--compress is for gradients, which --average local does not send"
    yield config.zero, "--zero needs equal gradients on all ranks, which --average local has not"
    yield config.spares > 0, f"--spares: with --average local a rank's model {_ALONE}"


def powersgd_contradictions(config: Config) -> Iterable[tuple[bool, str]]:
    yield config.spares > 0, f"--spares: with PowerSGD a rank's remainder of gradients {_ALONE}"


def refuse(contradictions: Iterable[tuple[bool, str]]) -> None:
    for wrong, said in contradictions:
        if wrong:
            raise UsageError(said)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _check_name(flag: str, value: str, names: Iterable[str], form: str) -> None:
    if value not in names and ":" not in value:
        raise UsageError(f"{flag} has to be {', '.join(names)}, {form}, got {value!r}{nearest(value, names)}")
    kind, colon, rest = value.partition(":")
    parts = rest.split(",") if kind in FILES else [rest]
    if colon and not (kind and all(parts)):
        form = f"{kind}:FILE" if kind in ("text", *FILES) else "MODULE:CALLABLE"
        raise UsageError(f"{flag} {value!r} has an empty part: give {form} without gaps")


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_options(parser, Config)


def read_options(arguments: argparse.Namespace) -> Config:
    return Config(**options.read_options(arguments, Config, OTHER_WORDS))


def resumed_threads(output: Path, ranks: int) -> int | None:
    """Return the BLAS threads of a run's newest checkpoint, which decide the order of sums.

    None if there is no checkpoint of as many ranks (others have other bits anyway), or it does not say.
    """
    states: list[Path] = []
    with contextlib.suppress(OSError):  # `Checkpointer` reports it
        states = sorted(output.glob("checkpoints/step-*/state.json"), reverse=True)
    for state in states:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            bits = json.loads(state.read_text())["bits"]
            threads = bits["BLAS threads"]
            return int(threads) if bits["ranks"] == ranks and threads is not None else None
    return None
