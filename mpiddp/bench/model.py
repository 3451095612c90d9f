"""``bench model``: a prediction of all-reduce on more ranks, from a ring measured on few.

A message of n bytes takes alpha + n beta seconds (Hockney 1994), reduction included. On k nodes of m ranks, p = k m,
with one alpha and beta in a node (near) and one between nodes (far):

  ring          2 (p-1) messages, 2 (p-1)/p n bytes: far on several nodes, for all wait for the slowest
  hierarchical  2 lg m near messages, 2 (m-1)/m n near bytes; 2 (k-1) far messages, 2 (k-1)/k n bytes on a node's link

(Patarasuk and Yuan 2009; Thakur, Rabenseifner and Gropp 2005.) Caches are not modelled. The fit leaves out every second
size; the printed error on these bounds the trust in predictions.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiddp import settings
from mpiddp.training.config import UsageError

from . import results
from .job import Bench, header, job
from .operations import Buffers, Mpiddp, choosing
from .results import format_size

ALGORITHMS = ("ring", "hierarchical")
_SIZES = [1 << power for power in range(8, 26)]
_ROUND_S, _FEWEST = 0.03, 5
_BUCKETS = [2**power for power in range(15)]


class Link(NamedTuple):
    """Seconds of a message, and of a byte."""

    alpha: float
    beta: float


class Sample(NamedTuple):
    """A measured ring, on one node or on a node a rank."""

    size_bytes: int
    ranks: int
    seconds: float


def ring(link: Link, size_bytes: float, ranks: int) -> float:
    """Return the seconds of a ring of equal links.

    >>> ring(Link(1.0, 0.001), 4000, 4)
    12.0
    """
    return 2 * (ranks - 1) * (link.alpha + size_bytes / ranks * link.beta)


def predict(algorithm: str, near: Link, far: Link, size_bytes: float, ranks: int, per_node: int) -> float:
    """Return seconds; ``near`` links are in a node, ``far`` ones between nodes."""
    m = min(per_node, ranks)
    nodes = -(-ranks // m)
    if algorithm == "ring":
        return ring(far if nodes > 1 else near, size_bytes, ranks)
    in_node = 2 * (m - 1).bit_length() * near.alpha + 2 * (m - 1) / m * size_bytes * near.beta
    return in_node + ring(far, size_bytes, nodes)


def fit(samples: Sequence[Sample]) -> Link:
    """Return the constants, not negative, with the least squares of relative errors; ValueError for one sample."""
    if len(samples) < 2:
        raise ValueError(f"a fit of two constants needs two measured times or more, got {len(samples)}")
    rows = np.array(
        [[ring(Link(1, 0), size, ranks) / s, ring(Link(0, 1), size, ranks) / s] for size, ranks, s in samples]
    )
    found = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    if found.min() < 0:  # the best fit then has one constant zero
        alone = rows.sum(axis=0) / np.square(rows).sum(axis=0)
        candidates = np.diag(alone)
        found = min(candidates, key=lambda each: float(np.square(rows @ each - 1).sum()))
    return Link(*map(float, found))


def relative_errors(samples: Sequence[Sample], link: Link) -> list[float]:
    """Return predicted over measured seconds, minus 1."""
    return [ring(link, each.size_bytes, each.ranks) / each.seconds - 1 for each in samples]


def exposed(each_s: float, count: int, compute_s: float) -> float:
    """Return the seconds that buckets, full at equal intervals and reduced in turn, add to a backward pass."""
    # The last bucket is full at the end; unfinished ones delay it.
    return max((count - index) * each_s - compute_s * (count - 1 - index) / count for index in range(count))


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code; needs MPI only to measure."""
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
    near = _fit(samples, "in a node")
    far = near
    if arguments.across:
        far = _fit(_read(arguments.across)[0], "across nodes")
    else:
        print("# across nodes: taken to be the same, for want of --across FILE; a network is slower than that")
    rows = _predict(near, far, arguments)
    if arguments.json:
        fitted = {"near": near._asdict(), "far": far._asdict()}
        results.write(arguments.json, "model", environment, [], fitted=fitted, rows=rows)
    return 0


def _read(files: list[Path]) -> tuple[list[Sample], dict[str, Any]]:
    """Read files of ``bench all_reduce --algorithm ring --json FILE``; return the environment of the last."""
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
            Sample(point.size_bytes, each.ranks, point.median_s)
            for each in series
            if each.operation == "all_reduce"
            for point in each.points
            if point.algorithm == "ring"
        ]
    if not samples:
        raise UsageError(
            f"no all_reduce by ring in {', '.join(map(str, files))}: measure one with"
            " bench all_reduce --algorithm ring --json FILE"
        )
    return samples, environment


def _measure(here: Bench) -> list[Sample]:
    if here.size == 1:
        raise UsageError("bench model measures on two ranks or more; give it files by --from, or start it with mpirun")
    samples = []
    with choosing("all_reduce", "ring"):
        for size in _SIZES:
            buffers = Buffers("all_reduce", here.rank, here.size, size, np.dtype(np.float32))
            call = Mpiddp().prepare(buffers)
            count = here.clock.enough(call, 2, buffers.reset, _ROUND_S, _FEWEST)
            samples.append(Sample(size, here.size, statistics.median(here.clock.each(call, count, buffers.reset))))
    return samples


def _fit(samples: list[Sample], where: str) -> Link:
    """Fit to every second sample; print the constants, and the error on the others."""
    ordered = sorted(samples)
    seen, unseen = ordered[::2], ordered[1::2]
    try:
        link = fit(seen)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    errors = sorted(abs(error) for error in relative_errors(unseen, link))
    print(
        f"# {where}: alpha {link.alpha * 1e6:.2f} us, beta {link.beta * 1e9:.3f} ns/byte, from {len(seen)} measured"
        f" times; error on {len(unseen)} others: median {statistics.median(errors):.0%}, largest {errors[-1]:.0%}"
    )
    return link


def _predict(near: Link, far: Link, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    total, per_node = arguments.bytes, arguments.per_node
    hidden = "as long as the faster takes" if arguments.compute is None else f"of {arguments.compute:g} s"
    print(f"# all-reduce of {format_size(total)}, {per_node} ranks a node, times in ms; the size of the buckets that")
    print(f"# leave least of it exposed beside a computation {hidden}, and that time")
    print("#ranks" + "".join(name.rjust(15) for name in (*ALGORITHMS, "bucket", "exposed")))
    rows = []
    for ranks in arguments.ranks:

        def fastest_s(size_bytes: float, ranks: int = ranks) -> float:
            return min(predict(name, near, far, size_bytes, ranks, per_node) for name in ALGORITHMS)

        times = {name: predict(name, near, far, total, ranks, per_node) for name in ALGORITHMS}
        compute_s = fastest_s(total) if arguments.compute is None else arguments.compute
        left_s, count = min((exposed(fastest_s(total / count), count, compute_s), count) for count in _BUCKETS)
        cells = [*(f"{seconds * 1e3:.3f}" for seconds in times.values()), format_size(int(total / count))]
        print(f"{ranks:6}" + "".join(cell.rjust(15) for cell in (*cells, f"{left_s * 1e3:.3f}")))
        rows.append({"ranks": ranks, "seconds": times, "bucket_bytes": total / count, "exposed_s": left_s})
    return rows
