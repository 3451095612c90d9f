"""The ranks of measure_hosts: ``wire.py all_reduce BYTES ROUNDS``, ``latency``, ``train`` or ``local``.

Rank 0 prints JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - teaches NumPy bfloat16
import numpy as np

import mpiddp as dist
from mpiddp.algorithms import plan
from mpiddp.data import DataLoader, GlobalBatchSampler, synthetic
from mpiddp.nn import functional, manual_seed
from mpiddp.optim import SGD
from mpiddp.parallel import (
    DistributedDataParallel,
    PowerSGDState,
    bf16_compress_hook,
    fp16_compress_hook,
    powerSGD_hook,
)
from mpiddp.training.models import MLP
from mpiddp.training.trainer import Trainer

CONTENDERS = ("hierarchical", "ring", "native")
BUCKETS_MB = (0.25, 1, 4, 25)
SAMPLES, BATCH, HIDDEN = 2048, 256, 1024
NOISE = 10.0
"""Of the test's samples: enough for some errors."""


def sent_bytes() -> int:
    """Return this host's sent bytes, headers included."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def latency() -> dict[str, float]:
    """Return the median time (us) of an all-reduce by its bytes."""
    found = {}
    for size_bytes, rounds in ((8, 300), (1 << 10, 300), (1 << 16, 300), (1 << 20, 40)):
        x, times = np.zeros(size_bytes // 8), []
        for _ in range(rounds):
            begun = time.perf_counter()
            dist.all_reduce(x)
            times.append(1e6 * (time.perf_counter() - begun))
        found[str(size_bytes)] = statistics.median(times)
    return found


def most(value: float) -> float:
    x = np.array([value])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x[0])


def all_reduce(size_bytes: int, rounds: int) -> dict[str, Any]:
    """Return time (s) and bytes sent by the busiest host of one all-reduce by each algorithm, taking turns."""
    x = dist.symmetric_empty(size_bytes // 4)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    sent: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name in CONTENDERS:
            os.environ["MPIDDP_ALGORITHM"] = f"all_reduce:{name}"
            plan.forget()
            x[...] = dist.get_rank() + 1
            dist.barrier()
            before, begun = sent_bytes(), time.perf_counter()
            dist.all_reduce(x)
            took = time.perf_counter() - begun
            dist.barrier()
            bytes_now = sent_bytes() - before
            assert (x == sum(range(1, dist.get_world_size() + 1))).all(), name
            del os.environ["MPIDDP_ALGORITHM"]
            plan.forget()
            took, bytes_now = most(took), most(bytes_now)
            if turn:  # the first makes connections
                times[name].append(took)
                sent[name] = bytes_now
    return {name: {"s": statistics.median(times[name]), "bytes": sent[name]} for name in CONTENDERS}


def trainer(
    bucket_mb: float, hook: Any = None, state: Any = None, samples: int = SAMPLES, noise: float = 2.0
) -> Trainer:
    """Return a trainer of a perceptron with 1.9 million parameters (7.5 MB), whose buckets a hook may reduce."""
    manual_seed(0)
    model = DistributedDataParallel(MLP(dropout=0.0, hidden=HIDDEN), bucket_cap_mb=bucket_mb)
    if hook is not None:
        model.register_comm_hook(state, hook)
    data = synthetic(samples, seed=0, noise=noise)
    loader = DataLoader(data, batch_sampler=GlobalBatchSampler(data, BATCH, seed=0))
    return Trainer(model, SGD(model.module.parameters(), lr=0.01, momentum=0.9), functional.nll_loss, loader)


def train(rounds: int = 3) -> dict[str, Any]:
    """Return step time (s), its share of waits for communication, and the loss, of each way to train."""
    ways = {f"{cap:g} MiB": trainer(cap) for cap in BUCKETS_MB}
    for hook in (fp16_compress_hook, bf16_compress_hook, powerSGD_hook):
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)  # in the warm-up
        ways[f"25 MiB, {hook.__name__}"] = trainer(25, hook, state if hook is powerSGD_hook else None)
    for turn in range(1, rounds + 2):  # the first warms up
        for each in ways.values():
            each.fit(turn)
    steps = SAMPLES // BATCH
    return {
        name: {
            "s": statistics.median(epoch.epoch_s for epoch in each.history[1:]) / steps,
            "exposed": statistics.median(epoch.comm_exposed for epoch in each.history[1:]),
            "loss": each.history[-1].loss,
        }
        for name, each in ways.items()
    }


def local(steps: int = 64, period: int = 8) -> dict[str, Any]:
    """Return bytes that a host sends a step, step time (s) and test loss, of DDP and of ways to send less.

    All see the same samples, each once. The test sees the ranks' averaged parameters.
    """
    found = {}
    test = synthetic(SAMPLES, seed=0, noise=NOISE, train=False)
    for name in ("DDP", "PowerSGD rank 4", "periodic averaging", "DiLoCo", "DiLoCo, 3 fragments"):
        state: Any = None
        hook: Any = None
        if "SGD" in name:
            hook, state = powerSGD_hook, PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        elif name != "DDP":
            hook = dist.noop_hook
        each = trainer(25, hook, state, steps * BATCH, NOISE)
        params = each.optimizer.param_groups
        averager: dist.DiLoCo | None = None
        if "DiLoCo" in name:
            averager = dist.DiLoCo(params, period, fragments=3 if "fragments" in name else 1)
        elif "periodic" in name:
            averager = dist.DiLoCo(params, period, lr=1, momentum=0)
        if averager is not None:
            each.callbacks["step_end"].append(lambda _, a=averager, p=params: a.average_parameters(p))
        dist.barrier()
        before, begun = sent_bytes(), time.perf_counter()
        each.fit(1)
        dist.barrier()
        took, sent = most(time.perf_counter() - begun) / steps, most(sent_bytes() - before) / steps
        if averager is not None:
            averager.synchronize()
        tally = each.evaluate(DataLoader(test, batch_size=BATCH))
        found[name] = {"bytes": sent, "s": took, "loss": tally.mean("loss"), "accuracy": tally.mean("correct")}
    return found


if __name__ == "__main__":
    dist.init_process_group()
    if sys.argv[1] == "all_reduce":
        found = all_reduce(int(sys.argv[2]), int(sys.argv[3]))
    else:
        found = {"latency": latency, "train": train, "local": local}[sys.argv[1]]()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
