"""The three ways of an all-reduce, beside what the machine can do at most. A GB is 10^9 bytes."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

import mpiddp as dist
from mpiddp.algorithms.gpu import table
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.lazy import MPI

from .correctness import correctness
from .rows import everywhere, say, seconds

MIB = 1 << 20


def copying(size_bytes: int, down: bool) -> Callable[[], None]:
    """Return what queues a copy from the device to pinned memory, or up from there."""
    memory: Any = cupy.cuda.alloc_pinned_memory(size_bytes)
    host, x = np.frombuffer(memory, np.uint8, size_bytes), cupy.zeros(size_bytes, np.uint8)
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream()
    ends = (host.ctypes.data, x.data.ptr) if down else (x.data.ptr, host.ctypes.data)
    kind = runtime.memcpyDeviceToHost if down else runtime.memcpyHostToDevice

    def copy(keep: tuple[Any, ...] = (host, x)) -> None:
        runtime.memcpyAsync(*ends, size_bytes, kind, stream.ptr)

    return copy


def message_rate(size_bytes: int) -> float:
    """Return the bytes a second at which every rank sends to the next and receives from the one before."""
    comm, rank, size = default_group().comm, dist.get_rank(), dist.get_world_size()
    x, y = np.zeros(size_bytes, np.uint8), np.empty(size_bytes, np.uint8)

    def exchange() -> None:
        requests = [comm.Irecv(y, (rank - 1) % size, 99), comm.Isend(x, (rank + 1) % size, 99)]
        while not MPI.Request.Testall(requests):
            time.sleep(0)

    return size_bytes / seconds(exchange, 5)


def reduces(x: cupy.ndarray, **options: Any) -> bool:
    """Return True if an all-reduce of ``x``, left full of zeros, gives the sum on every rank."""
    ranks = dist.get_world_size()
    x.fill(dist.get_rank() + 1)
    dist.all_reduce(x, **options)
    # CuPy brings these two compiled; for `all` it would compile for seconds.
    right = everywhere(x.min() == x.max() == ranks * (ranks + 1) / 2)
    x.fill(0)
    return right


def bounds(size: int) -> tuple[float, float]:
    """Say what the machine can do at most: return the rates of the slower copy and of messages, in bytes a second."""
    # All ranks copy at once, as they do in the ring: the bus is theirs together.
    down, up = size / seconds(copying(size, True), 5), size / seconds(copying(size, False), 5)
    wire = message_rate(size // 4)
    say("copy down to pinned memory, all ranks at once, each", down / 1e9, "GB/s")
    say("copy up from pinned memory, all ranks at once, each", up / 1e9, "GB/s")
    say("MPI, host to host, both directions at once, each", wire / 1e9, "GB/s")
    return min(down, up), wire


def curve(name: str, small: bool, bound: float | None = None, **options: Any) -> None:
    """Say the rates of all-reduces, of which each rank sends 2 (p - 1) / p S bytes."""
    ranks, largest = dist.get_world_size(), 4 if small else 256
    for mib in (largest, largest // 2, 1):
        x = cupy.zeros(mib * MIB // 4, np.float32)
        right = reduces(x, **options)
        taken = seconds(lambda x=x: dist.all_reduce(x, **options), 5)
        rate = 2 * (ranks - 1) / ranks * x.nbytes / taken
        say(f"{name}, all_reduce of {mib} MiB: {taken * 1e3:.3g} ms", rate / 1e9, "GB/s", wrong=not right)
        if bound is not None and mib == largest:
            say(f"{name} of {mib} MiB, share of the lowest rate on its way", rate / bound, least=0.8)


def staged(small: bool) -> None:
    """All-reduce through pinned memory: in two shots as on one node, whose bytes are only copied, and by the ring."""
    copies, messages = bounds((4 if small else 256) * MIB)
    curve("two shots through pinned memory", small, copies, algorithm="staged_two_shot")
    curve("staged ring", small, min(copies, messages), algorithm="staged_ring")


def pointers(small: bool) -> None:
    """All-reduce by device pointers, where the section "probe" has found that MPI takes them."""
    for kind, name in (("point_to_point", "device_ring"), ("collectives", "device_pointers")):
        answer = getattr(table.addresses, kind)
        if answer.yes:
            curve(name, small, algorithm=name)
        else:
            say(f"{name}: not run: {answer.reason}")


def nccl(small: bool) -> None:
    """All-reduce by NCCL, and compare all that goes by it, where each rank has a GPU of its own."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dist.init_process_group("nccl")
    if dist.get_backend() == "nccl":
        curve("NCCL", small)
        correctness(True)
    else:
        say(f"NCCL: not run: {'; '.join(str(each.message) for each in told)}")
    dist.destroy_process_group()
