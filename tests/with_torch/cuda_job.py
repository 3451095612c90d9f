"""The ranks of `test_cuda_tensors_go_as_cupy_arrays`: the way of CUDA tensors, on a fake device.

The tensors lie in the host's memory and say that they are CUDA's, CuPy is the fake of ``tests/harness``, and torch's
kernels are functions that its streams run late. mpiddp's half is all real.
"""

import itertools
import types
from collections.abc import Callable

import cupy  # the fake, by PYTHONPATH
import numpy as np
import torch
import torch.distributed as dist
from harness.collectives import COLLECTIVES, check

import mpiddp
import mpiddp.torch
from mpiddp.torch import arrays

GPU = torch.device("cuda", 0)


class OnDevice(torch.Tensor):
    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)
    device = property(lambda self: GPU)

    def plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).detach()

    def cpu(self) -> torch.Tensor:
        return self.plain().clone()

    def record_stream(self, stream: object) -> None:
        pass

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> object:
        assert stream == torchs.ptr, "CuPy's current stream is torch's"
        return self.as_subclass(torch.Tensor).__dlpack__()


def _staying(name: str) -> Callable[..., OnDevice]:
    def method(self: OnDevice, *arguments: object) -> OnDevice:
        return getattr(torch.Tensor, name)(self, *arguments).as_subclass(OnDevice)

    return method


for _name in ("detach", "view", "as_strided", "contiguous", "resolve_conj", "resolve_neg", "__getitem__"):
    setattr(OnDevice, _name, _staying(_name))  # torch.distributed turns off what keeps a subclass

torchs = cupy.cuda.Stream(non_blocking=True)
"""torch's current stream: not the default one, so whoever asks for that waits for nothing."""


kept: list[torch.Tensor] = []
"""torch's allocator does not reuse memory before the work of its stream is done."""


def late(value: torch.Tensor) -> OnDevice:
    """Return a tensor that a kernel of torch's will set to ``value``."""
    host = torch.full_like(value, 77)
    torchs.put("run", lambda: host.copy_(value))
    kept.append(host)
    return host.as_subclass(OnDevice)


def lent(tensor: torch.Tensor, moved: bool) -> object:
    loan = arrays.Loan(moved)
    found = loan.output(tensor)
    assert loan.device == GPU and not loan._copies
    return found


def check_memory_is_the_tensor_s(rank: int, size: int) -> None:
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        tensor = torch.ones(3, 5).to(dtype).as_subclass(OnDevice)
        for moved in (False, True):
            array = lent(tensor[1:], moved)
            assert isinstance(array, cupy.ndarray) and array.data.ptr == tensor[1:].data_ptr(), dtype
            assert moved or array.dtype.name == str(dtype).split(".")[1]
    assert lent(torch.ones(4).to(torch.float8_e4m3fn).as_subclass(OnDevice), True).nbytes == 4


def check_collectives(rank: int, size: int) -> None:
    world = types.SimpleNamespace(rank=rank, size=size, rng=np.random.default_rng(1))
    how = {"make": lambda x: late(torch.from_numpy(x)), "read": lambda x: x.plain().numpy(), "library": dist}
    for name, dtype, count in itertools.product(COLLECTIVES, ("uint8", "int64", "float16", "float32"), (0, 1, 127)):
        check(world, name, np.dtype(dtype), (count,), **how)
    check(world, "all_reduce", np.dtype("float32"), (40_000,), **how)
    dist.all_reduce(x := late(torch.full((40_000,), rank + 1).bfloat16()))
    assert (x.plain() == size * (size + 1) // 2).all()
    dist.all_reduce(x := late(torch.ones(2)), dist.ReduceOp.PREMUL_SUM(0.5))
    assert (x.plain() == size / 2).all()


def check_layouts(rank: int, size: int) -> None:
    base = torch.zeros(30, 40)
    across = base.t().as_subclass(OnDevice)
    across.plain().fill_(rank)
    dist.all_reduce(across, dist.ReduceOp.MAX)
    assert (base == size - 1).all(), "a copy of it is reduced, and copied back"
    xs = [late(torch.full((count,), float(rank))) for count in (1, 999)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work, x in zip(works, xs, strict=True):
        assert work.wait() and work.is_success() and work.result()[0] is x
        assert (x.plain() == size * (size - 1) / 2).all()
    future = dist.all_reduce(x := late(torch.ones(2)), async_op=True)
    while not future.is_completed():
        pass
    assert (x.plain() == size).all()


def check_messages(rank: int, size: int) -> None:
    if size > 1:
        sent = dist.isend(late(torch.full((5,), rank).bfloat16()), (rank + 1) % size, tag=3)
        assert dist.recv(x := late(torch.zeros(5).bfloat16()), tag=3) == (rank - 1) % size
        assert (x.plain() == (rank - 1) % size).all()
        sent.wait()


def check_without_cupy(rank: int, size: int) -> None:
    cuda_fault, arrays.cuda_fault = arrays.cuda_fault, lambda: "as without CuPy"
    torchs.synchronize()
    x = torch.full((9,), float(rank)).as_subclass(OnDevice)
    loan = arrays.Loan()
    assert not isinstance(loan.output(x), cupy.ndarray) and loan.device is None
    dist.all_reduce(x)
    assert (x.plain() == size * (size - 1) / 2).all(), "through the host"
    arrays.cuda_fault = cuda_fault


torch.cuda.is_initialized, torch.cuda.current_device = lambda: True, lambda: 0
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=torchs.ptr)
torch.cuda.get_device_capability = lambda device: (8, 0)
dist.init_process_group("mpiddp")
rank, size = dist.get_rank(), dist.get_world_size()
assert mpiddp.current_device() == 0
for each in [value for name, value in globals().items() if name.startswith("check_")]:
    each(rank, size)
assert not cupy.cuda.runtime.synchronised, "streams are waited for, never the device"
dist.destroy_process_group()
print("all right")
