"""The printed output of a run: its configuration, a line for each epoch, and each rank's warnings."""

import contextlib
import dataclasses
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator

from .config import Config
from .metrics import EpochMetrics


def say(text: str) -> None:
    """Print a text and ignore errors: a broken pipe or a full disk must not end days of training."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def configuration_lines(config: Config, ranks: int, nodes: int) -> str:
    lines = [f"training on {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}:"]
    tables: defaultdict[str, list[str]] = defaultdict(list)
    table = ""
    for each in dataclasses.fields(config):
        table = each.metadata["begins"] or table
        if (value := getattr(config, each.name)) is not None:
            tables[table].append(f"{each.name}={value}")
    return "\n".join([*lines, *(f"  {table + ':':14} {', '.join(said)}" for table, said in tables.items())])


def epoch_line(metrics: EpochMetrics, epochs: int) -> str:
    width = len(str(epochs))
    return (
        f"epoch {metrics.epoch:{width}d}/{epochs}  loss {metrics.loss:.4f}  accuracy {metrics.accuracy:.4f}"
        f"  {metrics.samples_per_s:7,.0f} samples/s  {metrics.epoch_s:5.2f} s  exposed comm {metrics.comm_exposed:5.1%}"
        f"  lr {metrics.lr:g}"
    )


@contextlib.contextmanager
def warnings_of(rank: int, size: int) -> Iterator[None]:
    """Print this rank's warnings and logged errors on stderr, with the rank in front of each."""
    root, handler = logging.getLogger(), logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"[rank {rank}/{size}] warning: %(message)s"))
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
