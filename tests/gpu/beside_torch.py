"""Beside torch in the same processes: its Gloo on the same CUDA tensors, and its tensors in our operations."""

import datetime
import os
from typing import Any

import cupy
import numpy as np

import mpiddp as dist

from .machine import torch_fault
from .rows import everywhere, say, seconds

MIB = 1 << 20


def torch_group() -> Any:
    """Return torch.distributed with a group of these ranks on Gloo, which meet through MPI."""
    import torch.distributed as td

    import mpiddp.torch  # noqa: F401 - registers what they meet by

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    td.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
    return td


def gloo(small: bool) -> None:
    fault = torch_fault()
    if fault:
        say(f"no comparison with Gloo: torch: {fault}")
        return
    import torch

    td = torch_group()
    largest = 8 if small else 512
    for mib in (8, 1) if small else (512, 64, 1):
        x = torch.full((mib * MIB // 4,), dist.get_rank() + 1.0, device="cuda")
        dist.all_reduce(x)
        wrong = not everywhere((x == dist.get_world_size() * (dist.get_world_size() + 1) / 2).all())
        x.zero_()
        theirs = seconds(lambda x=x: td.all_reduce(x), 2 if mib == largest else 5)
        ours = seconds(lambda x=x: dist.all_reduce(x), 5)
        say(f"Gloo, all_reduce of {mib} MiB of CUDA memory", theirs * 1e3, "ms")
        what = f"ours on the same tensor of {mib} MiB ({ours * 1e3:.3g} ms), times as fast"
        say(what, theirs / ours, least=10 if mib == largest and not small else None, wrong=wrong)
        del x
    td.destroy_process_group()


class Foreign:
    """Offers the CUDA array interface only."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.__cuda_array_interface__ = x.__cuda_array_interface__


def dlpack(small: bool) -> None:
    """Give CUDA tensors of torch, and arrays that have the CUDA array interface only, to the operations."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    y = cupy.full((1_003,), rank + 1.0, dtype=np.float32)
    dist.all_reduce(Foreign(y))
    say("an array with __cuda_array_interface__ is reduced in place", wrong=not everywhere((y.get() == total).all()))
    fault = torch_fault()
    if fault:
        say(f"no CUDA tensors: torch: {fault}")
        return
    import torch

    wrong = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        x = torch.full((2, 501), rank + 1, dtype=dtype, device="cuda")
        pointer = x.data_ptr()
        try:
            dist.all_reduce(x)
            work = dist.broadcast(x, 0, async_op=True)
            work.wait()
            rows = [torch.zeros_like(x) for _ in range(size)]
            dist.all_gather(rows, x)
        except dist.ArrayError as error:
            say(f"{dtype} is refused: {error}")
            continue
        right = bool((x == total).all()) and all(torch.equal(row, x) for row in rows) and x.data_ptr() == pointer
        wrong += [] if right else [str(dtype)]
    what = f"CUDA tensors of torch in place{': wrong for ' + ', '.join(wrong) if wrong else ''}"
    say(what, wrong=not everywhere(not wrong))
    try:
        dist.all_reduce(torch.ones(3, device="cuda", requires_grad=True))
        say("a tensor that requires grad was taken", wrong=True)
    except dist.ArrayError:
        say("a tensor that requires grad is refused")


def backend(small: bool) -> None:
    """Compare torch.distributed on the backend "mpiddp"."""
    fault = torch_fault()
    if fault:
        dist.init_process_group()
        say(f"torch's backend: not run: torch: {fault}")
        dist.destroy_process_group()
        return
    from .torch_backend import compare

    compare(small)
