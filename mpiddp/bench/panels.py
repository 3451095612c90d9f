"""What `plot` draws of benchmarks whose result is no time against size: overlap, DDP's steps and the model.

Imports the standard library and `results` only: `chart` draws, and tests look at the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.training.config import UsageError

from . import results

Document = Mapping[str, Any]


class Panel(NamedTuple):
    """A diagram: lines over numbers, or bars over names."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, dict[float | str, float]]
    """By the name of each line, its values by where they stand."""
    logarithmic: bool = False
    """Whether values of all magnitudes count alike."""


_OVERLAP_WAYS = ("compute", "comm", "blocking", "unpolled", "overlapped", "wait")
_DDP_WAYS = ("alone", "ddp", "torch", "exposed")


def _overlap(document: Document, mark: str) -> list[Panel]:
    """Return how much is hidden, and what each way takes, over the number of buckets."""
    rows = document["rows"]
    shares = {f"overlap{mark}": {row["buckets"]: row["overlap"] for row in rows}}
    times = {f"{way}{mark}": {row["buckets"]: row[way] * 1e3 for row in rows} for way in _OVERLAP_WAYS}
    return [
        Panel("Overlap: share of communication that is hidden", "buckets", "1 - exposed / comm", shares),
        Panel("Overlap: times", "buckets", "time (ms)", times),
    ]


def _ddp(document: Document, mark: str) -> list[Panel]:
    """Return what a training step takes, and how much more that is than alone, for each network."""
    rows = document["rows"]
    ways = [way for way in _DDP_WAYS if way in rows[0]]
    times = {f"{way}{mark}": {row["network"]: row[way] * 1e3 for row in rows} for way in ways}
    ratios = {
        f"{way} / alone{mark}": {row["network"]: row[way] / row["alone"] for row in rows}
        for way in ways
        if way in ("ddp", "torch")
    }
    return [
        Panel("DDP: a training step", "network", "time (ms)", times, logarithmic=True),
        Panel("DDP: what averaging costs", "network", "time / time alone", ratios),
    ]


def _model(document: Document, mark: str) -> list[Panel]:
    """Return what the model predicts of each algorithm, and which bucket it would take, over the number of ranks."""
    rows = document["rows"]
    times = {f"{name}{mark}": {row["ranks"]: row["seconds"][name] * 1e3 for row in rows} for name in rows[0]["seconds"]}
    buckets = {f"bucket{mark}": {row["ranks"]: row["bucket_bytes"] / 2**20 for row in rows}}
    return [
        Panel("Model: all-reduce, predicted", "ranks", "time (ms)", times, logarithmic=True),
        Panel("Model: bucket that leaves least exposed", "ranks", "bucket (MiB)", buckets, logarithmic=True),
    ]


_KINDS: dict[str, Callable[[Document, str], list[Panel]]] = {"overlap": _overlap, "ddp": _ddp, "model": _model}


def panels(files: list[Path]) -> list[Panel]:
    """Return the diagrams of files of `bench overlap`, `bench ddp` or `bench model`; none if they are of other kinds.

    Files of one kind share their diagrams; where there are several, lines get the names of their files added.

    Raises
    ------
    UsageError
        If only some of the files are of these kinds, or one of them is empty.
    """
    documents = [(file, results.read(file)[0]) for file in files]
    known = [(file, each) for file, each in documents if each["kind"] in _KINDS]
    if not known:
        return []
    if len(known) < len(documents):
        raise UsageError(
            f"files of `bench {known[0][1]['kind']}` and of others make no common picture: draw them apart"
        )
    found: dict[str, Panel] = {}
    for file, document in known:
        if not document["rows"]:
            raise UsageError(f"nothing to draw in {file}: it has no rows")
        for panel in _KINDS[document["kind"]](document, f" ({file.stem})" if len(files) > 1 else ""):
            before = found.setdefault(panel.title, panel._replace(lines={}))
            before.lines.update(panel.lines)
    return list(found.values())
