"""``bench train``: samples a second of the main job's training step on as many ranks as there are.

Strong scaling shares a batch of fixed size among the ranks, weak scaling gives each rank one. Start it on 1, 2, 4 ...
ranks, each with a file of its own, and give all files to ``plot``.
"""

from __future__ import annotations

import argparse

import numpy as np

from mpiddp.training.config import UsageError

from . import results
from .ddp import NETWORKS, Batch, Ours
from .job import Job, header, job
from .timing import Times

_WARMUP = 3


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    with job() as here:
        if arguments.strong_batch < here.size:
            raise UsageError(f"--strong-batch {arguments.strong_batch} is that of all {here.size} ranks together")
        environment = here.environment()
        here.say(header(environment))
        here.say("#network  scaling   ranks  samples a rank    step (ms)    samples/s")
        rows = []
        for network in NETWORKS:
            for scaling, batch in (("strong", arguments.strong_batch // here.size), ("weak", arguments.weak_batch)):
                times = _step(here, network, batch, arguments.iterations)
                samples_per_s = batch * here.size / times.median
                rows.append(
                    {"network": network, "scaling": scaling, "ranks": here.size, "batch": batch}
                    | {"step_s": times.median, "samples_per_s": samples_per_s}
                )
                here.say(
                    f"{network:8}  {scaling:8}{here.size:7}{batch:16}{times.median * 1e3:13.3f}{samples_per_s:13.0f}"
                )
        if arguments.json:
            here.together(lambda: results.write(arguments.json, "train", environment, [], rows=rows))
    return 0


def _step(here: Job, network: str, batch: int, iterations: int) -> Times:
    """Return what a step on so many samples a rank takes."""
    rng = np.random.default_rng(here.rank)
    images = rng.standard_normal((batch, 1, 28, 28)).astype(np.float32)
    ours = Ours(network, Batch(images, rng.integers(0, 10, batch)))
    return here.clock.measure(ours.step, iterations, _WARMUP)
