"""torch.distributed on the backend "mpiddp" with CUDA tensors: what it moves, torch's DDP and FSDP2, beside Gloo."""

import itertools
import os
import traceback
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as td
from harness.collectives import COLLECTIVES, check
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpiddp.torch  # noqa: F401 - registers the backend

from .rows import say, seconds
from .training import torch_perceptron, torch_step

MIB = 1 << 20


def compare(small: bool) -> None:
    """Compare each kind of use, and then time all-reduces and a step of DDP."""
    torch.cuda.set_device(0)
    td.init_process_group("mpiddp")
    for part in (moved, behind_streams, layouts, messages, futures, data_parallel, sharded, batch_norm):
        try:
            text = part(td.get_rank(), td.get_world_size())
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        everybody: list[Any] = [None] * td.get_world_size()
        td.all_gather_object(everybody, text)
        faults = [f"rank {rank}: {text}" for rank, text in enumerate(everybody) if text]
        what = ": ".join(["CUDA tensors", str(part.__doc__).rstrip("."), *faults])
        say(what[:1200], wrong=bool(faults))
    beside_gloo(small)
    td.destroy_process_group()


def moved(rank: int, size: int) -> str | None:
    """every collective."""
    world = SimpleNamespace(rank=rank, size=size, rng=np.random.default_rng(1))
    how: dict[str, Any] = {
        "make": lambda x: torch.from_numpy(x).cuda(), "read": lambda x: x.cpu().numpy(), "library": td,
    }  # fmt: skip
    dtypes = ("uint8", "int64", "float16", "float32")
    for name, dtype, count in itertools.product(COLLECTIVES, dtypes, (0, 1, 127, 40_009)):
        check(world, name, np.dtype(dtype), (count,), {"async_op": True} if count == 127 else {}, **how)
    td.all_reduce(x := torch.full((40_009,), rank + 1, device="cuda").bfloat16())
    assert (x == size * (size + 1) // 2).all(), "bfloat16"
    return None


def behind_streams(rank: int, size: int) -> str | None:
    """kernels before and after a call, on two streams."""
    square = torch.full((2_048, 2_048), 1e-3, device="cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for round_ in range(10):
                x = torch.zeros(100_003, device="cuda")
                for _ in range(100):
                    square = square @ square * 1e-3
                x += rank + 1 + round_
                work = td.all_reduce(x, async_op=True)
                work.wait()
                x *= 2
                assert (x == 2 * sum(each + 1 + round_ for each in range(size))).all(), stream
    return None


def layouts(rank: int, size: int) -> str | None:
    """tensors that are not contiguous."""
    base = torch.zeros(300, 400, device="cuda")
    base.t().fill_(rank + 1)
    td.all_reduce(base.t())
    td.broadcast(base[:, ::2], 0)
    assert (base == size * (size + 1) / 2).all()
    td.all_reduce(y := torch.arange(10, device="cuda").to(torch.int64), td.ReduceOp.AVG)
    assert (y == torch.arange(10, device="cuda")).all(), "average of integers"
    return None


def messages(rank: int, size: int) -> str | None:
    """messages."""
    for count in (1, 5_001, 3_000_001):
        sent = td.isend(torch.full((count,), rank, device="cuda").bfloat16(), (rank + 1) % size, tag=3)
        assert td.recv(x := torch.full((count,), 9.0, device="cuda").bfloat16(), tag=3) == (rank - 1) % size
        assert (x == (rank - 1) % size).all()
        sent.wait()
    there, here = torch.full((7,), float(rank), device="cuda"), torch.empty(7, device="cuda")
    ops = [td.P2POp(td.isend, there, (rank + 1) % size), td.P2POp(td.irecv, here, (rank - 1) % size)]
    for work in td.batch_isend_irecv(ops):
        work.wait()
    assert (here == (rank - 1) % size).all()
    return None


def futures(rank: int, size: int) -> str | None:
    """futures."""
    x = torch.full((1_000,), float(rank), device="cuda")
    half = td.all_reduce(x, async_op=True).get_future().then(lambda found: found.value()[0] / size)
    assert (half.wait() == (size - 1) / 2).all()
    return None


def net() -> Any:
    torch.manual_seed(0)
    return torch_perceptron(20, 64, 5)


def losses(model: Any, rank: int, size: int) -> list[float]:
    """Train on this rank's part of each batch, one of ``size``; return the mean loss of all ranks, step by step."""
    draw = torch.Generator().manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(6):
        x, y = torch.randn(24, 20, generator=draw), torch.randint(5, (24,), generator=draw)
        loss = torch.nn.functional.cross_entropy(model(x[rank::size].cuda()), y[rank::size].cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        td.all_reduce(mean := loss.detach().clone(), td.ReduceOp.AVG)
        found.append(mean.item())
    return found


def alone() -> list[float]:
    """Return the losses of every rank on whole batches."""
    return losses(net(), 0, 1)


def data_parallel(rank: int, size: int) -> str | None:
    """torch's DDP, and its hooks."""
    expected = alone()
    halves = default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook
    for hook, tolerance in zip((None, *halves), (1e-4, 2e-2, 5e-2), strict=True):
        model = DistributedDataParallel(net(), device_ids=[0], bucket_cap_mb=0.01)
        if hook is not None:
            model.register_comm_hook(None, hook)
        found = losses(model, rank, size)
        if not np.allclose(found, expected, rtol=tolerance):
            return f"{getattr(hook, '__name__', 'no hook')}: losses {found} instead of {expected}"
    return None


def sharded(rank: int, size: int) -> str | None:
    """torch's FSDP2."""
    model = net()
    mesh = init_device_mesh("cuda", (size,))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found, expected = losses(model, rank, size), alone()
    return None if np.allclose(found, expected, rtol=1e-4) else f"losses {found} instead of {expected}"


def batch_norm(rank: int, size: int) -> str | None:
    """torch's SyncBatchNorm."""
    torch.manual_seed(3)
    x = torch.randn(4 * size, 6, 5, device="cuda")
    whole = torch.nn.BatchNorm1d(6).cuda()
    norm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(6)).cuda()
    model = DistributedDataParallel(norm, device_ids=[0])
    expected, found = whole(x), model(x[rank * 4 : (rank + 1) * 4])
    (expected**3).mean().backward()
    (found**3).mean().backward()
    torch.testing.assert_close(found, expected[rank * 4 : (rank + 1) * 4], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.weight.grad, whole.weight.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(norm.running_var, whole.running_var, rtol=1e-4, atol=1e-5)
    return None


def beside_gloo(small: bool) -> None:
    """Time all-reduces and a step of torch's DDP by this backend and by torch's Gloo, in the same processes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    other = td.new_group(backend="gloo")
    for mib in (8, 1) if small else (512, 64, 1):
        x = torch.zeros(mib * MIB // 4, device="cuda")
        theirs = seconds(lambda x=x: td.all_reduce(x, group=other), 2)
        ours = seconds(lambda x=x: td.all_reduce(x), 5)
        say(f"torch's all_reduce of {mib} MiB by mpiddp ({ours * 1e3:.3g} ms), Gloo's time over ours", theirs / ours)
        del x
    width, samples = (64, 8) if small else (2_048, 128)
    ours, theirs = (seconds(torch_step(width, samples, True, group), 10) for group in (None, other))
    say(f"torch's DDP by mpiddp, batch {samples} a rank, width {width}", ours * 1e3, "ms")
    say("its time over that by Gloo", ours / theirs, most=1.0)
