"""Bandwidths, each beside what the machine can do at most, measured in the same job. A GB is 10^9 bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

import mpiddp as dist
from mpiddp.distributed.groups import default_group
from mpiddp.mpi.lazy import MPI

from .rows import everywhere, say, seconds, symmetric_floats

MIB = 1 << 20


def alone(measure: Callable[[], float]) -> float:
    """Return what rank 0 measures while the others wait without work for the GPU; the same on all ranks."""
    found = [measure() if dist.get_rank() == 0 else None]
    dist.barrier()
    dist.broadcast_object_list(found, 0)
    return float(found[0])  # type: ignore[arg-type]


def copy_rate(size_bytes: int) -> float:
    """Return the rate of a copy on the device in bytes read and written a second."""
    x, y, copies = cupy.zeros(size_bytes, np.uint8), cupy.empty(size_bytes, np.uint8), 8

    def copy() -> None:
        for _ in range(copies):  # one after the other: what the host needs to start one is no part of the rate
            cupy.copyto(y, x)

    return 2 * size_bytes * copies / seconds(copy, 10, together=False)


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


def reduces(x: cupy.ndarray) -> bool:
    """Return True if an all-reduce of ``x``, left full of zeros, gives the sum on every rank."""
    ranks = dist.get_world_size()
    x.fill(dist.get_rank() + 1)
    dist.all_reduce(x)
    # CuPy brings these two compiled; for `all` it would compile for seconds.
    right = everywhere(x.min() == x.max() == ranks * (ranks + 1) / 2)
    x.fill(0)
    return right


def ipc(small: bool) -> None:
    """All-reduce in memory that the ranks' GPUs share: 2 p S bytes are read and written by all together."""
    ranks = dist.get_world_size()
    largest = 8 if small else 512
    copied = alone(lambda: copy_rate(largest * MIB))
    say("copy on the device (read + written)", copied / 1e9, "GB/s")
    for mib in (8, 1) if small else (512, 128, 16, 1):
        x = symmetric_floats(mib * MIB // 4)
        right = reduces(x)
        taken = seconds(lambda x=x: dist.all_reduce(x), 10)
        rate = 2 * ranks * x.nbytes / taken
        goal = 0.6 if mib == largest else None
        say(
            f"symmetric all_reduce of {mib} MiB: {taken * 1e3:.3g} ms, share of the copy's rate",
            rate / copied,
            least=goal,
            wrong=not right,
        )
        del x
    ordinary = cupy.zeros(largest * MIB // 8, np.float32)
    right = reduces(ordinary)
    taken = seconds(lambda: dist.all_reduce(ordinary), 5)
    rate = 2 * ranks * ordinary.nbytes / taken
    what = f"ordinary all_reduce of {largest // 2} MiB: {taken * 1e3:.3g} ms, share of the copy's rate"
    say(what, rate / copied, wrong=not right)


def staged(small: bool) -> None:
    """All-reduce by the ring through pinned memory: each rank sends 2 (p - 1) / p S bytes."""
    ranks = dist.get_world_size()
    size = (4 if small else 256) * MIB
    # All ranks copy at once, as they do in the ring: the bus is theirs together.
    down, up = size / seconds(copying(size, True), 5), size / seconds(copying(size, False), 5)
    wire = message_rate(size // 4)
    say("copy down to pinned memory, all ranks at once, each", down / 1e9, "GB/s")
    say("copy up from pinned memory, all ranks at once, each", up / 1e9, "GB/s")
    say("MPI, host to host, both directions at once, each", wire / 1e9, "GB/s")
    x = cupy.zeros(size // 4, np.float32)
    right = reduces(x)
    taken = seconds(lambda: dist.all_reduce(x), 5)
    rate = 2 * (ranks - 1) / ranks * size / taken
    bound = min(down, up, wire)
    what = (
        f"staged ring of {size // MIB} MiB: {taken * 1e3:.3g} ms, {rate / 1e9:.3g} GB/s, share of the lowest of these"
    )
    say(what, rate / bound, least=0.8, wrong=not right)
