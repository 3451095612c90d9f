"""``plot RUN_DIR...``: training runs side by side, from what ``train --output DIR`` has left there. Needs no MPI."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.training.config import UsageError

_SAME_WORK = ("model", "data", "batch_size")
"""What runs have in common that differ in nothing but their ranks: then they show how the work scales."""


class Run(NamedTuple):
    """What a run's folder tells."""

    name: str
    ranks: int
    config: dict[str, Any]
    epochs: list[dict[str, float | None]]
    """What ``metrics.jsonl`` says of each; None is what was not finite, or not measured."""

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Return the epochs that have a number, and the numbers."""
        points = [(each["epoch"], value) for each in self.epochs if (value := each.get(key)) is not None]
        return [epoch for epoch, _ in points if epoch is not None], [value for _, value in points]

    @property
    def samples_per_s(self) -> float:
        """The median over epochs: the first one warms up, another may have been disturbed."""
        return statistics.median(self.curve("samples_per_s")[1])


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the folders of runs.

    Raises
    ------
    UsageError
        If a folder is not one of ``train --output``, or no epoch has ended in it.
    """
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _read(folder: Path, name: str) -> Run:
    try:
        config = json.loads((folder / "config.json").read_text())
        ranks = len(json.loads((folder / "run.json").read_text())["ranks"])
        lines = (folder / "metrics.jsonl").read_text()
        # A line without its end is one that a killed run has not finished.
        epochs = [json.loads(line) for line in lines[: lines.rfind("\n") + 1].splitlines()]
    except OSError as error:
        raise UsageError(f"{folder} is no folder of `train --output`: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder}: a file of the run is damaged ({error!r})") from error
    if not epochs:
        raise UsageError(f"nothing to draw in {folder}: no epoch has ended yet")
    return Run(name, ranks, config, epochs)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the ends of paths, as long as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while length < max(map(len, parts)) and len({each[-length:] for each in parts}) < len(set(parts)):
        length += 1
    return ["/".join(each[-length:]) for each in parts]


def scaling(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Return samples a second by ranks, for each work that was done on several numbers of ranks.

    Returns
    -------
    dict
        By what the runs share; the median where several had as many ranks.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        work = ", ".join(f"{key} {run.config[key]}" for key in _SAME_WORK if run.config.get(key) is not None)
        found.setdefault(work, {}).setdefault(run.ranks, []).append(run.samples_per_s)
    return {
        work: {ranks: statistics.median(by_ranks[ranks]) for ranks in sorted(by_ranks)}
        for work, by_ranks in found.items()
        if len(by_ranks) > 1
    }


def table(runs: Sequence[Run]) -> str:
    """Return a line for each run: how far it came, how good it is, how fast it was."""
    width = max(len("run"), *(len(run.name) for run in runs))
    lines = [f"{'run':{width}}  ranks  epochs  last loss  best accuracy (epoch)  samples/s"]
    for run in runs:
        losses, (epochs, accuracies) = run.curve("loss")[1], run.curve("accuracy")
        loss = f"{losses[-1]:.4f}" if losses else "-"
        best = max(zip(accuracies, epochs, strict=True), key=lambda point: (point[0], -point[1]), default=None)
        said = "-" if best is None else f"{best[0]:.4f} ({best[1]:.0f})"
        lines.append(
            f"{run.name:{width}}{run.ranks:7}{len(run.epochs):8}{loss:>11}{said:>23}{run.samples_per_s:11,.0f}"
        )
    return "\n".join(lines)
