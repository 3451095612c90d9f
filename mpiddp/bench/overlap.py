"""``bench overlap``: the share of communication that hides behind computation, for one bucket to many.

The computation is a series of matrix products, like a backward pass. A bucket's all-reduce starts when its layers are
done; pending operations are polled after each layer, as in DistributedDataParallel's gradient hooks.

compute      the layers alone
comm         the buckets alone, one after the other
blocking     the layers, then the buckets
unpolled     each bucket launched when it is full, without a poll until the end
overlapped   the same with a poll after each layer
wait         its part after the last layer
overlap      1 - (overlapped - compute) / comm: 1 hides all, 0 nothing; polls, cores and caches count as exposed
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
from mpiddp.mpi.lazy import MPI
from mpiddp.typing import Array

from .job import Bench, job
from .results import format_size, size_range
from .timing import Way, nothing

_EDGE = 128
"""Matrices are small, so that the number of products can set any time."""
_COLUMNS = ("compute", "comm", "blocking", "unpolled", "overlapped", "wait")


class Computation:
    def __init__(self, layers: int, products: int) -> None:
        rng = np.random.default_rng(0)
        self._a, self._b, self._c = (rng.standard_normal((_EDGE, _EDGE)).astype(np.float32) for _ in range(3))
        self.layers, self.products = layers, products

    def run(self, after: Callable[[int], object]) -> None:
        """Call ``after`` with the number of each finished layer."""
        for layer in range(self.layers):
            for _ in range(self.products):
                np.matmul(self._a, self._b, out=self._c)
            after(layer)


def run(arguments: argparse.Namespace) -> int:
    with job() as here:
        here.describe()
        count = max(arguments.bytes // 4, arguments.buckets)
        gradients = dist.symmetric_empty(count) if arguments.symmetric else np.empty(count, np.float32)
        assert gradients is not None
        gradients[...] = 0
        computation = _calibrate(here, arguments, gradients)
        memory = "symmetric" if arguments.symmetric else "ordinary"
        here.say(
            f"# {format_size(gradients.nbytes)} of float32 gradients in {memory} memory, averaged behind"
            f" {computation.layers} layers of {computation.products} products of {_EDGE} x {_EDGE} matrices;"
            f" times in ms, medians over {arguments.rounds} rounds, slowest rank"
        )
        here.say("#buckets" + "".join(name.rjust(12) for name in (*_COLUMNS, "overlap")))
        rows = []
        for buckets in size_range(1, min(arguments.buckets, computation.layers), 2):
            row = _measure(here, computation, gradients, buckets, arguments.rounds)
            rows.append({"buckets": buckets, **row})
            cells = [f"{row[name] * 1e3:.3f}" for name in _COLUMNS] + [f"{row['overlap']:.2f}"]
            here.say(f"{buckets:8}" + "".join(cell.rjust(12) for cell in cells))
        here.write(arguments.json, "overlap", rows=rows)
        wrong = sum(row["wrong"] for row in rows)
        here.say(f"# Wrong values: {wrong} {'FAILED' if wrong else 'OK'}")
    return int(wrong > 0)


def _calibrate(here: Bench, arguments: argparse.Namespace, gradients: Array) -> Computation:
    """Make it as long as ``--compute``, or as the communication."""
    seconds = arguments.compute
    if seconds is None:
        seconds = statistics.median(here.clock.each(lambda: dist.all_reduce(gradients, dist.ReduceOp.AVG), 5))
    layers = max(arguments.layers, 2)
    one = Computation(layers, 1)
    each = statistics.median(here.clock.each(lambda: one.run(_no_bucket), 5)) / layers
    return Computation(layers, max(round(seconds / layers / each), 1))


def _no_bucket(_: int) -> None:
    return None


def _measure(here: Bench, computation: Computation, gradients: Array, count: int, rounds: int) -> dict[str, Any]:
    layers, average = computation.layers, dist.ReduceOp.AVG
    buckets = np.array_split(gradients, count)
    # Layer l completes the buckets that end with it.
    due: dict[int, list[Array]] = {}
    for index, bucket in enumerate(buckets):
        due.setdefault((index + 1) * layers // len(buckets) - 1, []).append(bucket)
    waits: list[float] = []
    """Seconds of waiting after the last layer, in each call of "overlapped"."""

    def communicate() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket, average)

    def blocking() -> None:
        computation.run(_no_bucket)
        communicate()

    def unpolled(poll: Callable[[], object] = nothing) -> float:
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
        return time.perf_counter() - start

    def overlapped() -> None:
        waits.append(unpolled(requests.poll))

    ways: dict[str, Callable[[], object]] = {
        "compute": lambda: computation.run(_no_bucket),
        "comm": communicate,
        "blocking": blocking,
        "unpolled": unpolled,
        "overlapped": overlapped,
    }
    turns = here.clock.take_turns({name: Way(way) for name, way in ways.items()}, rounds)
    took = {name: [seconds for (seconds,) in each] for name, each in turns.items()}
    took["wait"] = [here.comm.allreduce(each, MPI.MAX) for each in waits[1::2]]  # the other half is not measured
    exposed = statistics.median(
        (whole - alone) / comm
        for whole, alone, comm in zip(took["overlapped"], took["compute"], took["comm"], strict=True)
    )
    gradients[...] = here.rank
    overlapped()
    wrong = here.sum(int(np.count_nonzero(gradients != (here.size - 1) / 2)))
    gradients[...] = 0
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    return {**medians, "overlap": 1 - exposed, "wrong": wrong}
