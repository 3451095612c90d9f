"""What the figures were measured on, and what its MPI is said and found to do with device pointers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile

import cupy

from mpiddp.device import nccl

from .rows import say


def machine(small: bool) -> None:
    """Name GPU, driver and libraries."""
    import mpi4py

    from mpiddp.mpi import capability

    runtime = cupy.cuda.runtime
    found = runtime.getDeviceProperties(runtime.getDevice())
    memory = found.get("totalGlobalMem", 0) / 2**30
    say(f"GPU: {found['name'].decode()}, {memory:.0f} GiB, {runtime.getDeviceCount()} visible")
    if hasattr(runtime, "driverGetVersion"):
        say(f"CUDA driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}")
    facts = capability.inspect()
    say(f"CuPy {cupy.__version__}, mpi4py {mpi4py.__version__}, {facts.library}")
    for kind, answer in facts.device_pointers._asdict().items():
        say(f"device pointers, {kind.replace('_', ' ')}: {'yes' if answer.yes else 'no'}: {answer.reason}")
    say(f"NCCL: {nccl.fault() or 'usable'}")
    say(f"torch: {torch_fault() or 'usable with CUDA'}")
    say(f"cores: {len(os.sched_getaffinity(0))}")


def torch_fault() -> str | None:
    """Return why torch cannot use the GPU."""
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch

    return None if torch.cuda.is_available() else f"{torch.__version__} has no CUDA here"


def probe(small: bool) -> None:
    """Let MPI try device pointers, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "mpiddp", "info", "--probe-gpu", "--json"],
            env={**os.environ, "MPIDDP_CACHE": cache},
            capture_output=True,
            text=True,
            timeout=25,
            check=False,
        )
    if done.returncode:
        say(f"info --probe-gpu: exit code {done.returncode}: {done.stderr.strip()[-400:]}", wrong=True)
        return
    for kind, answer in json.loads(done.stdout)["mpi"]["device_pointers"].items():
        say(f"probe, {kind.replace('_', ' ')}: {'yes' if answer['yes'] else 'no'}: {answer['reason']}")
