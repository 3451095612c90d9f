"""``bench overlap``: how much of the communication hides behind computation, for one bucket to many.

The computation is a row of matrix products, as a backward pass is; after each of its layers an asynchronous operation
gets a chance to go on, as in the gradient hooks of DistributedDataParallel. A bucket is reduced as soon as the layers
are done that fill it, so the last one has nothing to hide behind.

compute      the layers alone
comm         the buckets alone, one after the other
blocking     the layers, then the buckets
unpolled     each bucket launched when it is full, and nobody asks after it until the end
overlapped   the same with a poll after each layer
wait         the part of it after the last layer
overlap      1 - exposed / comm, where exposed = overlapped - compute: 1 hides everything, 0 nothing; the polls and
             what communication takes from the computation's cores and caches count as exposed
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mpiddp.distributed as dist
from mpiddp.mpi import requests
from mpiddp.typing import Array

from . import results, sizes
from .job import Job, header, job

_EDGE = 128
"""Of the matrices: small, so that a layer of several products can take any time."""
_COLUMNS = ("compute", "comm", "blocking", "unpolled", "overlapped", "wait")


class Computation:
    """Layers of matrix products.

    Parameters
    ----------
    layers : int
        Their number.
    products : int
        Matrix products in each.
    """

    def __init__(self, layers: int, products: int) -> None:
        rng = np.random.default_rng(0)
        self._a, self._b, self._c = (rng.standard_normal((_EDGE, _EDGE)).astype(np.float32) for _ in range(3))
        self.layers, self.products = layers, products

    def run(self, after: Callable[[int], object]) -> None:
        """Compute, and call ``after`` with the number of each layer that is done."""
        for layer in range(self.layers):
            for _ in range(self.products):
                np.matmul(self._a, self._b, out=self._c)
            after(layer)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    with job() as here:
        environment = here.environment()
        here.say(header(environment))
        count = max(arguments.bytes // 4, arguments.buckets)
        gradients = dist.symmetric_empty(count) if arguments.symmetric else np.empty(count, np.float32)
        assert gradients is not None
        gradients[...] = 0
        computation = _calibrate(here, arguments, gradients)
        memory = "symmetric" if arguments.symmetric else "ordinary"
        here.say(
            f"# {sizes.text(gradients.nbytes)} of float32 gradients in {memory} memory, averaged behind"
            f" {computation.layers} layers of {computation.products} products of {_EDGE} x {_EDGE} matrices;"
            f" times in ms, medians over {arguments.rounds} rounds, slowest rank"
        )
        here.say("#buckets" + "".join(name.rjust(12) for name in (*_COLUMNS, "overlap")))
        rows = []
        for buckets in sizes.sweep(1, min(arguments.buckets, computation.layers), 2):
            row = _measure(here, computation, gradients, buckets, arguments.rounds)
            rows.append({"buckets": buckets, **row})
            cells = [f"{row[name] * 1e3:.3f}" for name in _COLUMNS] + [f"{row['overlap']:.2f}"]
            here.say(f"{buckets:8}" + "".join(cell.rjust(12) for cell in cells))
        if arguments.json:
            here.together(lambda: results.write(arguments.json, "overlap", environment, [], rows=rows))
        wrong = sum(row["wrong"] for row in rows)
        here.say(f"# Wrong values: {wrong} {'FAILED' if wrong else 'OK'}")
    return int(wrong > 0)


def _calibrate(here: Job, arguments: argparse.Namespace, gradients: Array) -> Computation:
    """Return a computation that takes as long as was asked for, or as communication does."""
    seconds = arguments.compute
    if seconds is None:
        seconds = statistics.median(here.clock.each(lambda: dist.all_reduce(gradients, dist.ReduceOp.AVG), 5))
    layers = max(arguments.layers, 2)
    one = Computation(layers, 1)
    each = statistics.median(here.clock.each(lambda: one.run(_nothing), 5)) / layers
    return Computation(layers, max(round(seconds / layers / each), 1))


def _nothing(_: int) -> None:
    return None


def _measure(here: Job, computation: Computation, gradients: Array, count: int, rounds: int) -> dict[str, Any]:
    """Return the medians over rounds in which all ways take turns, in seconds, and how many elements came out wrong."""
    layers, average = computation.layers, dist.ReduceOp.AVG
    buckets = np.array_split(gradients, count)
    # Layer l completes the buckets that end with it.
    due: dict[int, list[Array]] = {}
    for index, bucket in enumerate(buckets):
        due.setdefault((index + 1) * layers // len(buckets) - 1, []).append(bucket)
    waits: list[float] = []

    def communicate() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket, average)

    def blocking() -> None:
        computation.run(_nothing)
        communicate()

    def overlapped(poll: Callable[[], object]) -> None:
        works: list[dist.Work] = []

        def after(layer: int) -> None:
            for bucket in due.get(layer, ()):
                launched = dist.all_reduce(bucket, average, async_op=True)
                assert launched is not None
                works.append(launched)
            poll()

        computation.run(after)
        start = time.perf_counter()
        for each in works:
            each.wait()
        waits.append(time.perf_counter() - start)

    ways: dict[str, Callable[[], object]] = {
        "compute": lambda: computation.run(_nothing),
        "comm": communicate,
        "blocking": blocking,
        "unpolled": lambda: overlapped(lambda: None),
        "overlapped": lambda: overlapped(requests.poll),
    }
    took: dict[str, list[float]] = {name: [] for name in (*ways, "wait")}
    for way in ways.values():
        here.clock.each(way, 1)
    for _ in range(rounds):
        for name, way in ways.items():
            took[name] += here.clock.each(way, 1)
        took["wait"].append(here.comm.allreduce(waits[-1], _largest))
    exposed = statistics.median(
        (whole - alone) / comm
        for whole, alone, comm in zip(took["overlapped"], took["compute"], took["comm"], strict=True)
    )
    gradients[...] = here.rank
    overlapped(requests.poll)
    wrong = here.sum(int(np.count_nonzero(gradients != (here.size - 1) / 2)))
    gradients[...] = 0
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    return {**medians, "overlap": 1 - exposed, "wrong": wrong}


def _largest(a: float, b: float) -> float:
    return max(a, b)
