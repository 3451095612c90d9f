"""The machine of the figures, and what its MPI is said and found to do with device pointers."""

import importlib.util
import os

import cupy

from mpiddp.bench import probe as device_probe
from mpiddp.device import nccl

from .rows import say
from .sections import PROBE_LIMIT_S


def machine(small: bool) -> None:
    import mpi4py

    from mpiddp.mpi import cuda_aware

    runtime = cupy.cuda.runtime
    found = runtime.getDeviceProperties(runtime.getDevice())
    memory = found.get("totalGlobalMem", 0) / 2**30
    say(f"GPU: {found['name'].decode()}, {memory:.0f} GiB, {runtime.getDeviceCount()} visible")
    if hasattr(runtime, "driverGetVersion"):
        say(f"CUDA driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}")
    facts = cuda_aware.inspect()
    say(f"CuPy {cupy.__version__}, mpi4py {mpi4py.__version__}, {facts['library']}")
    for kind, answer in facts["device_pointers"].items():
        say(f"device pointers, {kind.replace('_', ' ')}: {'yes' if answer['yes'] else 'no'}: {answer['reason']}")
    say(f"NCCL: {nccl.fault() or 'usable'}")
    say(f"cores: {len(os.sched_getaffinity(0))}")
    say(f"torch: {torch_fault() or 'usable with CUDA'}")  # last: its first import reads gigabytes


def torch_fault() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch

    return None if torch.cuda.is_available() else f"{torch.__version__} has no CUDA here"


def probe(small: bool) -> None:
    """Let MPI try device pointers as ``info --probe-gpu`` does: a job that hangs is ended."""
    for kind, answer in device_probe.run(limit_s=PROBE_LIMIT_S).items():
        say(f"probe, {kind.replace('_', ' ')}: {'yes' if answer.yes else 'no'}: {answer.reason}")
