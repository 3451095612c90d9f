"""``bench model``: all-reduce on more ranks than there are here, by formulas fitted to what was measured.

Every second size of each measured algorithm is kept from the fit: the error that is printed is that on what the fit
has not seen.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from mpiddp import settings
from mpiddp.training.config import UsageError

from . import model, results, sizes
from .buffers import Buffers
from .contenders import Mpiddp, choosing
from .job import Job, header, job, ordinary
from .model import Constants, Machine, Sample

_MEASURED = ("ring", "tree")
_SIZES = [1 << power for power in range(8, 26)]
_ROUNDS, _ROUND_S, _FEWEST = 3, 0.01, 3


def run(arguments: argparse.Namespace) -> int:
    """Fit, predict, print, and return the exit code. Needs MPI only where it has to measure."""
    if arguments.sources:
        announced = settings.launch()
        samples, environment = _read(arguments.sources)
        if announced is not None and announced.rank != 0:
            return 0
    else:
        with job() as here:
            samples, environment = _measure(here), here.environment()
        if here.rank != 0:
            return 0
    print(header(environment))
    print(*(f"# {line}" for line in _formulas()), sep="\n")
    near = _fit(samples, "in a node")
    far = near
    if arguments.across:
        far = _fit(_read(arguments.across)[0], "across nodes")
    else:
        print("# across nodes: taken to be the same, for want of --across FILE; a network is slower than that")
    machine = Machine(near, far)
    rows = _predict(machine, arguments)
    if arguments.json:
        results.write(
            arguments.json, "model", environment, [], fitted={"near": near._asdict(), "far": far._asdict()}, rows=rows
        )
    return 0


def _formulas() -> list[str]:
    """Return the lines of the model's description that state formulas and sources: plain text, for it is printed."""
    assert model.__doc__ is not None
    return model.__doc__.strip().splitlines()[2:]


def _read(files: list[Path]) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples in files of ``bench all_reduce --algorithm NAME --json FILE``, and where they come from."""
    samples: list[Sample] = []
    environment: dict[str, Any] = {}
    for file in files:
        document, series = results.read(file)
        environment = document["environment"]
        nodes = environment["nodes"]
        if len(nodes) > 1 and max(nodes) > 1:
            raise UsageError(
                f"{file} was measured on nodes of {nodes} ranks: the fit needs all ranks on one node, or one on each"
            )
        samples += [
            Sample(point.algorithm, point.size_bytes, each.ranks, point.median_s)
            for each in series
            if each.operation == "all_reduce"
            for point in each.points
            if point.algorithm in model.ALGORITHMS
        ]
    if not samples:
        raise UsageError(
            f"no all_reduce by {', '.join(model.ALGORITHMS)} in {', '.join(map(str, files))}: measure one with"
            " bench all_reduce --algorithm ring --json FILE"
        )
    return samples, environment


def _measure(here: Job) -> list[Sample]:
    """Measure both algorithms, which take turns."""
    if here.size == 1:
        raise UsageError("bench model measures on two ranks or more; give it files by --from, or start it with mpirun")
    took: dict[tuple[str, int], list[float]] = {}
    for size in _SIZES:
        buffers = Buffers("all_reduce", here.rank, here.size, size, np.dtype(np.float32), "sum", ordinary)
        buffers.rest()
        call = Mpiddp().prepare(buffers)
        for _ in range(_ROUNDS):
            for name in _MEASURED:
                with choosing("all_reduce", name):
                    count = here.clock.enough(call, 2, _ROUND_S, _FEWEST)
                    took.setdefault((name, size), []).append(statistics.median(here.clock.each(call, count)))
    return [Sample(name, size, here.size, statistics.median(each)) for (name, size), each in took.items()]


def _fit(samples: list[Sample], where: str) -> Constants:
    """Fit to half of the samples, and print the constants and the error on the others."""
    ordered = sorted(samples)
    seen, unseen = ordered[::2], ordered[1::2]
    try:
        constants = model.fit(seen)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    print(
        f"# {where}: alpha {constants.alpha * 1e6:.2f} us, beta {constants.beta * 1e9:.3f} ns/byte, gamma"
        f" {constants.gamma * 1e9:.3f} ns/byte{_spill(constants)}, from {len(seen)} measured times"
    )
    for name in dict.fromkeys(each.algorithm for each in unseen):
        mine = [each for each in unseen if each.algorithm == name]
        errors = sorted(abs(error) for error in model.relative_errors(mine, constants))
        print(
            f"#   error on {len(mine)} times of {name} that the fit has not seen: median"
            f" {statistics.median(errors):.0%}, largest {errors[-1]:.0%}"
        )
    return constants


def _spill(constants: Constants) -> str:
    """Return what is said of the caches, where they were seen."""
    if not constants.spill:
        return ""
    return f", spill {constants.spill * 1e9:.3f} ns/byte beyond a cache of {sizes.text(constants.cache_bytes)}"


def _predict(machine: Machine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a line for each number of ranks, and return what it says."""
    total, per_node = arguments.bytes, arguments.per_node
    names = model.ALGORITHMS
    hidden = "as long as the fastest takes" if arguments.compute is None else f"of {arguments.compute:g} s"
    print(f"# all-reduce of {sizes.text(total)}, {per_node} ranks a node, times in ms; the bucket that leaves least of")
    print(f"# it exposed beside a computation {hidden}, and what that is")
    print(
        "#ranks"
        + "".join(name.rjust(17) for name in names)
        + "fastest".rjust(17)
        + "bucket".rjust(9)
        + "exposed".rjust(12)
    )
    rows = []
    for ranks in arguments.ranks:
        times = {name: machine.time(model.cost(name, total, ranks, per_node), total) for name in names}
        fastest = min(times, key=lambda name: times[name])
        compute_s = times[fastest] if arguments.compute is None else arguments.compute
        bucket, _, left = model.best_bucket(machine, total, ranks, per_node, compute_s)
        cells = "".join(f"{seconds * 1e3:.3f}".rjust(17) for seconds in times.values())
        print(f"{ranks:6}{cells}{fastest:>17}{sizes.text(int(bucket)):>9}{left * 1e3:12.3f}")
        rows.append({"ranks": ranks, "seconds": times, "bucket_bytes": bucket, "exposed_s": left})
    return rows
