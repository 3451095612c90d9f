"""``Config``: what a training run can be told. The command line and the TOML file are made from its fields.

Imports the standard library only: it is read before NumPy may be imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from . import options
from .deadline import parse_duration
from .options import AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE, option
from .options import RunError as RunError
from .options import UsageError as UsageError
from .options import nearest as nearest

MODELS = ("net", "mlp", "resnet", "transformer")
DATA = ("digits", "mnist", "synthetic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a training run.

    Every field is an option of ``python -m mpiddp train`` (``batch_size`` is ``--batch-size``) and a key of a TOML file
    given by ``--config``, at its top or in the table that the field names; the command line overrides the file.

    Raises
    ------
    UsageError
        If a value is outside of its range, or two of them contradict each other.

    Examples
    --------
    >>> Config(epochs=10, momentum=0.5).batch_size
    64
    """

    # -- network: what is trained ----------------------------------------------------------------------------------
    model: str = field(
        default="net",
        metadata=option(
            "the tutorial's network (net), a perceptron (mlp), a residual network with batch norm (resnet), a"
            " transformer for text, or MODULE:CALLABLE, which returns a Module when called without arguments",
            table="network",
            metavar="NAME",
            also=("network", "arch"),
        ),
    )
    dropout: float | None = field(
        default=None,
        metadata=option(
            "probability with which a unit is left out in training (default: 0.5 of net and mlp, 0 of resnet, 0.1 of"
            " transformer)",
            table="network",
            within=SHARE,
            also=("drop_rate",),
        ),
    )
    sync_batchnorm: bool = field(
        default=False,
        metadata=option(
            "batch norms take mean and variance over the batches of all ranks", table="network", also=("sync_bn",)
        ),
    )

    # -- input: what it is trained on ------------------------------------------------------------------------------
    data: str = field(
        default="digits",
        metadata=option(
            "1,797 digits that come with the package (digits), MNIST from --data-dir (mnist), made-up"
            " images (synthetic), text:FILE, npy:, npz: or idx:FILE[,FILE], or MODULE:CALLABLE, called with"
            " train=True and train=False",
            table="input",
            metavar="NAME",
            also=("dataset",),
        ),
    )
    data_dir: Path | None = field(
        default=None,
        metadata=option("folder of MNIST's four IDX files, gzipped or not", table="input", metavar="DIR"),
    )
    download: bool = field(
        default=False,
        metadata=option("fetch MNIST's files into --data-dir where they are missing", table="input"),
    )
    context: int = field(
        default=64,
        metadata=option(
            "bytes of text in a sample",
            table="input",
            within=AT_LEAST_1,
            also=("window", "block_size", "sequence_length"),
        ),
    )
    batch_size: int = field(
        default=64,
        metadata=option("samples a batch, over all ranks together", table="input", within=AT_LEAST_1, also=("bs",)),
    )
    workers: int = field(
        default=0,
        metadata=option(
            "threads of each rank that fetch batches ahead; 0: none",
            table="input",
            within=AT_LEAST_0,
            also=("num_workers",),
        ),
    )

    # -- optimization: how a step is made --------------------------------------------------------------------------
    optimizer: str = field(
        default="sgd",
        metadata=option(
            "what makes a step of gradients", "sgd", "adam", "adamw", table="optimization", also=("optim",)
        ),
    )
    lr: float = field(
        default=0.01,
        metadata=option("learning rate", table="optimization", within=POSITIVE, also=("learning_rate", "rate")),
    )
    momentum: float = field(
        default=0.9,
        metadata=option(
            "share of the previous update that goes on; Adam's first beta",
            table="optimization",
            within=SHARE,
            also=("beta1",),
        ),
    )
    beta2: float = field(
        default=0.999,
        metadata=option(
            "Adam's second beta: share of the previous mean square that goes on", table="optimization", within=SHARE
        ),
    )
    weight_decay: float = field(
        default=0.0,
        metadata=option(
            "times each parameter, added to its gradient; with adamw: taken off the parameter itself",
            table="optimization",
            within=AT_LEAST_0,
            also=("wd", "l2"),
        ),
    )
    zero: bool = field(
        default=False,
        metadata=option(
            "each rank holds the optimizer state of, and updates, its share of the parameters",
            table="optimization",
            also=("zero_redundancy",),
        ),
    )
    accumulate: int = field(
        default=1,
        metadata=option(
            "batches whose gradients make one step",
            table="optimization",
            within=AT_LEAST_1,
            also=("gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches"),
        ),
    )
    clip_norm: float | None = field(
        default=None,
        metadata=option(
            "limit of the norm of all gradients together",
            table="optimization",
            within=POSITIVE,
            also=("max_norm", "max_grad_norm", "clip_grad_norm", "gradient_clipping"),
        ),
    )
    label_smoothing: float = field(
        default=0.0,
        metadata=option("share of the target that is spread over all classes", table="optimization", within=SHARE),
    )
    schedule: str = field(
        default="constant",
        metadata=option(
            "how the learning rate goes on after the warm-up: half a cosine to --lr-min at the end, or times --decay"
            " every --decay-epochs",
            *("constant", "cosine", "step"),
            table="optimization",
            also=("scheduler", "lr_schedule"),
        ),
    )
    warmup_steps: int = field(
        default=0,
        metadata=option(
            "steps in which the learning rate grows to --lr", table="optimization", within=AT_LEAST_0, also=("warmup",)
        ),
    )
    lr_min: float = field(
        default=0.0,
        metadata=option("where the cosine ends", table="optimization", within=AT_LEAST_0, also=("eta_min", "min_lr")),
    )
    decay: float = field(
        default=0.1,
        metadata=option("factor of --schedule step", table="optimization", within=POSITIVE, also=("gamma",)),
    )
    decay_epochs: int = field(
        default=10,
        metadata=option(
            "epochs between two changes of --schedule step",
            table="optimization",
            within=AT_LEAST_1,
            also=("step_size",),
        ),
    )

    # -- precision -------------------------------------------------------------------------------------------------
    dtype: str = field(
        default="float32",
        metadata=option(
            "of matrix products and convolutions; parameters, their gradients and losses stay float32; on the host the"
            " halves are slower than float32",
            *("float32", "float16", "bfloat16"),
            table="precision",
            also=("precision", "amp", "fp16", "bf16", "mixed_precision"),
        ),
    )
    loss_scale: float = field(
        default=65536.0,
        metadata=option(
            "first factor of float16's losses; halved when a gradient overflows", table="precision", within=POSITIVE
        ),
    )
    loss_scale_steps: int = field(
        default=2000,
        metadata=option(
            "steps without overflow after which that factor is doubled",
            table="precision",
            within=AT_LEAST_1,
            also=("growth_interval",),
        ),
    )

    # -- ddp: how gradients are averaged ---------------------------------------------------------------------------
    average: str = field(
        default="ddp",
        metadata=option(
            "average gradients in buckets during backward, or one by one after it", "ddp", "naive", table="ddp"
        ),
    )
    compress: str = field(
        default="none",
        metadata=option(
            "send gradients in half precision, or as matrices of low rank",
            *("none", "fp16", "bf16", "powersgd", "batched-powersgd"),
            table="ddp",
            also=("compression", "comm_hook"),
        ),
    )
    powersgd_rank: int = field(
        default=1, metadata=option("rank of PowerSGD's matrices", table="ddp", within=AT_LEAST_1)
    )
    powersgd_start: int = field(
        default=1000,
        metadata=option(
            "steps before PowerSGD compresses", table="ddp", within=options.Range("at least 2", lambda n: n >= 2)
        ),
    )
    bucket_cap_mb: float | None = field(
        default=None,
        metadata=option("MiB at which a bucket of gradients is closed", table="ddp", within=POSITIVE),
    )
    bucket_cap_mb_list: tuple[float, ...] | None = field(
        default=None,
        metadata=option("the same for the first, second, ... bucket", table="ddp", within=POSITIVE, metavar="MIB"),
    )
    find_unused_parameters: bool = field(
        default=False, metadata=option("allow parameters that get no gradient in a step", table="ddp")
    )
    static_graph: bool = field(
        default=False, metadata=option("the same parameters get no gradient in every step", table="ddp")
    )
    gradient_as_bucket_view: bool = field(
        default=True, metadata=option("gradients are views of their bucket: always so here", table="ddp")
    )
    broadcast_buffers: bool = field(
        default=True,
        metadata=option("copy running statistics of the first rank to all, at the start and in steps", table="ddp"),
    )
    forward_sync_buffers: bool = field(default=True, metadata=option("copy them in steps, too", table="ddp"))
    init_sync: bool = field(
        default=True, metadata=option("check at the start that all ranks hold the first one's model", table="ddp")
    )

    # -- run -------------------------------------------------------------------------------------------------------
    epochs: int = field(
        default=20,
        metadata=option(
            "passes over the training data", table="run", within=AT_LEAST_1, also=("num_epochs", "n_epochs")
        ),
    )
    seed: int = field(
        default=0,
        metadata=option(
            "fixes initial values, split, order of samples and dropout",
            table="run",
            within=AT_LEAST_0,
            also=("random_seed", "manual_seed"),
        ),
    )
    device: str = field(
        default="auto",
        metadata=option(
            "where arrays live; auto: on GPUs where every rank has one", "auto", "cpu", "cuda", table="run"
        ),
    )
    on_nan: str = field(
        default="stop",
        metadata=option("what to do in a step whose loss or gradients are not finite", "stop", "skip", table="run"),
    )
    max_time: str | None = field(
        default=None,
        metadata=option(
            "stop with a checkpoint and exit code 75 before this time since the start is over, in seconds or H:MM:SS;"
            " slurm: before the end of the Slurm job",
            table="run",
            metavar="TIME",
            also=("time_limit", "deadline"),
        ),
    )
    margin: float = field(
        default=30.0,
        metadata=option("seconds before the end of --max-time to leave for that", table="run", within=AT_LEAST_0),
    )

    # -- files -----------------------------------------------------------------------------------------------------
    metrics: Path | None = field(
        default=None, metadata=option("write one JSON line per epoch to this file", table="files", metavar="FILE")
    )
    timeline: Path | None = field(
        default=None,
        metadata=option(
            "write what every rank did when to this file, for ui.perfetto.dev", table="files", metavar="FILE"
        ),
    )
    output: Path | None = field(
        default=None,
        metadata=option(
            "save model, configuration, metrics and checkpoints in this folder",
            table="files",
            metavar="DIR",
            also=("output_dir", "out_dir", "save_dir"),
        ),
    )
    log_ranks: bool = field(
        default=False, metadata=option("write a log file for every rank in --output", table="files")
    )
    resume: str = field(
        default="no",
        metadata=option(
            "auto goes on from the newest whole checkpoint in --output, if there is one", "no", "auto", table="files"
        ),
    )
    checkpoint_steps: int = field(
        default=0,
        metadata=option(
            "steps between checkpoints, besides those after every epoch; 0 is none",
            table="files",
            within=AT_LEAST_0,
            also=("save_steps",),
        ),
    )
    keep: int = field(
        default=3,
        metadata=option(
            "newest checkpoints to keep; the most accurate one stays besides", table="files", within=AT_LEAST_1
        ),
    )

    def __post_init__(self) -> None:
        options.check(self)
        _check_name("--model", self.model, MODELS, "MODULE:CALLABLE")
        _check_name("--data", self.data, DATA, "text:FILE, npy:, npz: or idx:FILE[,FILE] or MODULE:CALLABLE")
        if self.max_time is not None:
            parse_duration(self.max_time)
        for wrong, said in self._contradictions():
            if wrong:
                raise UsageError(said)

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        """Yield what does not go together, and whether it is asked for."""
        files = self.output is None
        yield files and self.resume != "no", f"--resume {self.resume} needs --output DIR, the folder of the run"
        yield files and self.log_ranks, "--log-ranks needs --output DIR, the folder to write the files in"
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
        yield (
            self.data in DATA and self.model == "transformer",
            (f"--model transformer reads text, and --data {self.data} is images: give --data text:FILE"),
        )
        naive = self.average == "naive"
        for each in dataclasses.fields(self):
            changed = each.metadata["table"] == "ddp" and getattr(self, each.name) not in (each.default, "naive")
            yield naive and changed, f"{options.flag(each.name)} is an option of --average ddp, not of naive"
        yield (
            naive and self.timeline is not None,
            ("--timeline FILE shows buckets, which --average naive has none of; leave one out"),
        )
        yield (
            self.bucket_cap_mb is not None and self.bucket_cap_mb_list is not None,
            ("give --bucket-cap-mb or --bucket-cap-mb-list, not both"),
        )
        yield (
            not self.gradient_as_bucket_view,
            ("--no-gradient-as-bucket-view: gradients are always views of their bucket here; leave it out"),
        )
        yield (
            "powersgd" in self.compress and self.dtype == "float16",
            (
                f"--compress {self.compress} adds what it has lost to the next gradient, which --dtype float16 scales"
                " otherwise; take --dtype bfloat16, or --compress fp16"
            ),
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Make a configuration of plain values, such as those of a TOML or JSON file.

        Raises
        ------
        UsageError
            If a key is unknown (the text names the nearest one that is), or a value is of another type.
        """
        return cls(**options.from_mapping(cls, values))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON and TOML know; those that are not set as None."""
        return {key: _plain(value) for key, value in vars(self).items()}

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return `as_dict` in tables, as a TOML file may have them."""
        found: dict[str, dict[str, Any]] = {}
        for each in dataclasses.fields(self):
            found.setdefault(each.metadata["table"], {})[each.name] = _plain(getattr(self, each.name))
        return found

    def as_json(self) -> str:
        """Return `as_dict` as the text of a JSON file."""
        return json.dumps(self.as_dict(), indent=1) + "\n"


def _plain(value: Any) -> Any:
    """Return a field's value as JSON has it."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _check_name(flag: str, value: str, names: Iterable[str], form: str) -> None:
    """Refuse a name that is none, and has no colon either."""
    if value not in names and ":" not in value:
        raise UsageError(f"{flag} has to be {', '.join(names)}, {form}, got {value!r}{nearest(value, names)}")


OTHER_WORDS = options.other_words(Config)
"""What others call the options, with their names here."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and an option for every field; what is not given stays out of the parsed namespace."""
    options.add_options(parser, Config)


def read_options(arguments: argparse.Namespace) -> Config:
    """Return the configuration of a parsed command line (see `add_options`).

    Raises
    ------
    UsageError
        If the file cannot be read, or a key or a value is wrong.
    """
    return Config(**options.read_options(arguments, Config))
