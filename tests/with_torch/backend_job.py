"""The ranks of `test_backend`: collectives, messages, groups and DDP of torch's on the backend "mpiddp"."""

import contextlib
import functools
import threading
import time
import types
import warnings
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
from harness import without_dynamo  # noqa: F401
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed import _dist2
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import mpiddp
import mpiddp.torch
from mpiddp.mpi import recorder
from mpiddp.shm.segment import find
from mpiddp.torch.arrays import Loan
from mpiddp.torch.work import Work

DTYPES = (torch.uint8, torch.uint32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_dtypes_and_layouts(rank: int, size: int) -> None:
    for dtype in DTYPES:
        x = torch.full((3, 5), rank + 1).to(dtype)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((3, 5), size * (size + 1) // 2).to(dtype)), dtype
        dist.broadcast(x := torch.full((2,), rank).to(dtype), src=size - 1)
        assert (x == size - 1).all(), dtype
    base = torch.zeros(4, 6)
    across = base.t()  # not contiguous: goes through a copy
    across += rank
    dist.all_reduce(across, dist.ReduceOp.MAX)
    assert (base == size - 1).all()
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf, dist.ReduceOp.AVG)
    assert (leaf == 1).all() and leaf.requires_grad
    scaled = torch.ones(2)
    dist.all_reduce(scaled, dist.ReduceOp.PREMUL_SUM(0.5))
    assert (scaled == 0.5 * size).all()
    floats8 = [torch.zeros(4, dtype=torch.float8_e4m3fn) for _ in range(size)]
    dist.all_gather(floats8, torch.full((4,), float(rank)).to(torch.float8_e4m3fn))
    assert [each.float()[0].item() for each in floats8] == list(range(size))


def check_average_of_integers(rank: int, size: int) -> None:
    """As NCCL's: the sum wraps, and is divided towards zero; only outputs are."""
    total, average = size * (size + 1) // 2, dist.ReduceOp.AVG
    for dtype in (torch.int64, torch.int8, torch.uint8):
        for sign in (1, -1) if dtype.is_signed else (1,):
            whole = torch.full((2 * size, 3), sign * (rank + 1), dtype=dtype)
            expected = sign * (total // size)
            dist.all_reduce(x := whole.clone(), average)
            assert (x == expected).all(), (x, expected)
            dist.all_reduce(x := whole.clone(), average, async_op=True).wait()
            assert (x == expected).all()
            dist.all_reduce(whole.clone().t(), average)
            dist.reduce(x := whole.clone(), 0, average)
            assert (x == (expected if rank == 0 else whole)).all()
            dist.reduce_scatter_single(x := torch.empty(2, 3, dtype=dtype), whole, average)
            assert (x == expected).all() and (whole == sign * (rank + 1)).all()
    for count in (1, 5_000, 300_000):  # short ones end at once
        x = torch.full((count,), 2 * size + 1)
        works = [dist.all_reduce(x, op, async_op=True) for op in (average, dist.ReduceOp.SUM, average)]
        for work in works if rank else works[::-1]:
            work.wait()
        assert (x == size * (2 * size + 1)).all(), x
    dist.reduce_scatter(
        x := torch.empty(1, dtype=torch.int32), [torch.full((1,), rank, dtype=torch.int32)] * size, average
    )
    assert x.item() == (size - 1) // 2


def check_views(rank: int, size: int) -> None:
    """Outputs and inputs that overlap as FSDP's do, negative bits, columns, no dimension, no element."""
    whole = torch.zeros(4 * size)
    mine = whole[4 * rank : 4 * rank + 4]
    mine += rank
    dist.all_gather_single(whole, mine)
    assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(4))
    whole = torch.arange(4.0 * size)
    dist.reduce_scatter_single(mine := whole[4 * rank : 4 * rank + 4], whole)
    assert torch.equal(mine, size * torch.arange(4.0 * rank, 4 * rank + 4))
    negative = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    assert negative.is_neg()
    dist.all_reduce(negative)
    assert (negative == -size).all()
    base = torch.zeros(4, 4 * size)
    dist.all_gather([base[:, 4 * each : 4 * each + 4] for each in range(size)], torch.full((4, 4), float(rank)))
    assert (base == torch.arange(float(size)).repeat_interleave(4)).all()
    scalars = [torch.zeros(()) for _ in range(size)]
    dist.all_gather(scalars, torch.tensor(float(rank)))
    assert [each.item() for each in scalars] == list(range(size))
    dist.all_reduce(torch.zeros(0))
    dist.all_reduce(product := nn.Parameter(torch.ones(3)) * 2)
    assert (product == 2 * size).all() and product.requires_grad
    with torch.inference_mode():
        dist.all_reduce(x := torch.ones(2, 3).t())
    assert (x == size).all()


def check_zero_copy(rank: int, size: int) -> None:
    whole = torch.ones(1000)
    part = whole[10:20]
    before = part.data_ptr()
    dist.all_reduce(part)
    assert recorder.entries()[-1].code.co_filename == __file__, "the line is the program's, not torch's"
    assert part.data_ptr() == before
    assert whole.sum() == 990 + 10 * size
    shared = mpiddp.torch.symmetric_empty((4, 100), torch.float64)
    assert size == 1 or find(shared[2:].numpy()).segment
    assert not find(whole.numpy()).segment
    shared.fill_(1)
    dist.all_reduce(shared)
    assert shared.shape == (4, 100) and (shared == size).all()


def check_asynchronous(rank: int, size: int) -> None:
    xs = [torch.full((n,), float(rank)) for n in (1, 1000, 300_000)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work, x in zip(works, xs, strict=True):
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        assert work.result()[0] is x
        assert (x == size * (size - 1) / 2).all()
    future = dist.all_reduce(x := torch.ones(2), async_op=True).get_future()
    assert future.then(lambda found: found.value()[0].sum()).wait() == 2 * size
    assert (x == size).all()
    for call in (
        lambda x: dist.all_reduce(x, async_op=True),
        lambda x: dist.all_gather_single(torch.empty(9 * size, dtype=x.dtype), x, async_op=True),
    ):
        for ask in (lambda work: None, lambda work: work.get_future()):
            memory = weakref.ref(array := np.ones(9))
            work = call(torch.from_numpy(array))
            ask(work)
            del array
            assert work.wait() and memory() is None, "it is the program's again"


def check_groups(rank: int, size: int) -> None:
    order = list(range(size))[::-1]
    backwards = dist.new_group(order, sort_ranks=False)
    assert dist.get_rank(backwards) == size - 1 - rank
    few = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(x := torch.ones(1), group=few)
        assert x == 1
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank}, backwards)
    assert [each["rank"] for each in found] == order
    local = dist.new_group([rank], use_local_synchronization=True)
    dist.barrier(local)
    dist.destroy_process_group(backwards)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key{rank}", str(rank))
    assert store.get(f"key{(rank + 1) % size}") == str((rank + 1) % size).encode()
    assert store.add("sum", 0) == 0
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    assert store.delete_key(f"key{rank}") and keys == size + 1


def check_messages(rank: int, size: int) -> None:
    """Of known and of any source, with tags, in batches, and of objects."""
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(torch.full((n,), float(rank)), right, tag=n) for n in (3, 5)]
    assert dist.recv(x := torch.empty(5), left, tag=5) == left and (x == left).all()
    dist.irecv(x := torch.empty(3), left, tag=3).wait()
    assert (x == left).all()
    for work in works:
        work.wait()
    dist.barrier()
    if rank:
        dist.send(torch.full((2,), float(rank)), 0)
    else:
        sources = [dist.recv(x := torch.empty(2)) for _ in range(size - 1)]
        assert sorted(sources) == list(range(1, size)) and x[0] == sources[-1]
    dist.barrier()  # else the next message may come before another rank's
    y = torch.full((2,), float(rank))
    batch = [dist.P2POp(dist.isend, y, right), dist.P2POp(dist.irecv, x := torch.empty(2), left)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert (x == left).all()
    if rank == 0:
        dist.send_object_list(["object", {"of": 0}], 1)
    if rank == 1:
        dist.recv_object_list(found := [None, None], 0)
        assert found == ["object", {"of": 0}]


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(head, nn.Linear(4 * 36, 300), nn.ReLU(), nn.Linear(300, 10))


def _train(model: nn.Module, batches: int, rank: int, accumulate: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(batches):
        generator = torch.Generator().manual_seed(1000 * rank + index)
        x, y = torch.randn(6, 1, 8, 8, generator=generator), torch.randint(0, 10, (6,), generator=generator)
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                nn.functional.cross_entropy(model(x), y).backward()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def check_python_comm_hooks(rank: int, size: int) -> None:
    for state, hook in ((None, fp16_compress_hook), (PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)):
        model = nn.parallel.DistributedDataParallel(_network(rank))
        model.register_comm_hook(state, hook)
        _train(model, 4, rank)
        first = [torch.zeros(300, 144) for _ in range(size)]
        dist.all_gather(first, model.module[1].weight.detach())
        assert all(torch.equal(each, first[0]) for each in first)


def check_own_ddp(rank: int, size: int) -> None:
    """mpiddp's DistributedDataParallel does on a torch module what torch's does."""
    options = {"static_graph": True, "gradient_as_bucket_view": True}
    theirs, other = (nn.parallel.DistributedDataParallel(_network(rank), **each) for each in ({}, options))
    ours = mpiddp.torch.DistributedDataParallel(_network(rank))
    for one in (theirs, ours, other):
        _train(one, 3, rank)
    _same(theirs.module.state_dict(), ours.module.state_dict())
    _same(theirs.module.state_dict(), other.module.state_dict())
    for one in (theirs, ours):
        _train(one, 2, rank, accumulate=True)
    _same(dict(theirs.module.named_parameters()), dict(ours.module.named_parameters()))
    addresses = sorted((each.grad.data_ptr(), each.grad.nbytes) for each in ours.parameters())
    ends = [address + length for address, length in addresses]
    assert ends[:-1] == [address for address, _ in addresses[1:]], "gradients lie side by side in their bucket"
    for one in (theirs, ours):
        with one.join():
            _train(one, 1 + rank, rank)
    _same(dict(theirs.module.named_parameters()), dict(ours.module.named_parameters()))
    ours.check_replicas()

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.even, self.odd, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.odd(x) if rank % 2 else self.even(x)

    branches = mpiddp.torch.DistributedDataParallel(Branches(), find_unused_parameters=True)
    branches(torch.ones(2, 3)).sum().backward()
    assert branches.module.never.weight.grad is None
    assert torch.allclose(branches.module.even.bias.grad, torch.full((3,), 2 * ((size + 1) // 2) / size))


def check_failing_hooks(rank: int, size: int) -> None:
    """A hook's own error comes out of backward, and the ranks go on together."""

    def hook(state, bucket):  # torch checks annotations
        raise ValueError("of the hook")

    for wrap in (nn.parallel.DistributedDataParallel, mpiddp.torch.DistributedDataParallel):
        model = wrap(nn.Linear(3, 3))
        model.register_comm_hook(None, hook)
        with pytest.raises(ValueError, match=r"^of the hook$"):
            model(torch.ones(2, 3)).sum().backward()
        dist.all_reduce(x := torch.ones(2))
        assert (x == size).all()


def check_loader_and_threads(rank: int, size: int) -> None:
    """Forked workers of a DataLoader leave MPI alone; a backward in a thread of the program's own."""
    data = torch.utils.data.TensorDataset(torch.arange(12.0)[:, None])
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about cores, of Python about forks
        for (x,) in torch.utils.data.DataLoader(
            data, 2, sampler=sampler, num_workers=2, multiprocessing_context="fork"
        ):
            model(x).sum().backward()
    thread = threading.Thread(target=lambda: model(torch.ones(2, 1)).sum().backward())
    model.zero_grad()
    thread.start()
    thread.join()
    assert model.module.weight.grad == 2


def check_differentiable(rank: int, size: int) -> None:
    """Compare ``torch.distributed.nn.functional`` on the backend with Gloo, outputs and gradients."""
    gloo = dist.new_group(backend="gloo")
    blocks = {
        "all_reduce": lambda x, group: functional.all_reduce(x, group=group),
        "all_gather": lambda x, group: torch.stack(functional.all_gather(x, group=group)),
        "broadcast": lambda x, group: functional.broadcast(x, size - 1, group=group),
        "reduce": lambda x, group: functional.reduce(x, 0, group=group),
        "gather": lambda x, group: torch.stack(functional.gather(x, 0, group=group)),
        "reduce_scatter": lambda x, group: functional.reduce_scatter(
            torch.empty(3, dtype=x.dtype), [x[:3] * (each + 1) for each in range(size)], group=group
        ),
        "all_to_all_single": lambda x, group: functional.all_to_all_single(
            torch.empty(2 * size, dtype=x.dtype), x[:2].repeat(size), group=group
        ),
    }
    for name, function in blocks.items():
        found = []
        for group in (None, gloo):
            torch.manual_seed(rank)
            x = torch.randn(5, dtype=torch.float64, requires_grad=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch has other names for them, too
                y = function(x * (rank + 1), group)
            (y * torch.randn(y.shape, dtype=torch.float64)).sum().backward()
            found.append((y.detach(), x.grad))
        (y, gradient), (expected, expected_gradient) = found
        if name != "reduce" or rank == 0:  # elsewhere torch leaves what was there
            np.testing.assert_allclose(y, expected, rtol=1e-7, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-7, atol=1e-7, err_msg=name)


def _with_gloo(call, *expected_errors: type[Exception]) -> None:
    """Expect a call to give on mpiddp's group what it gives on Gloo's, or to raise errors of these classes on both."""
    found = []
    for group in (dist.group.WORLD, _gloo()):
        try:
            values = tree_map_only(torch.Tensor, lambda x: x.to_dense().tolist(), call(group))
            found.append(values)
        except expected_errors as error:
            found.append(next(each for each in expected_errors if isinstance(error, each)))
    assert found[0] == found[1], found


@functools.cache
def _gloo() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


def check_forms(rank: int, size: int) -> None:
    """The group's own methods take what those of torch's groups take."""
    root, last = int(rank == 0), size - 1

    def xs(*values: float) -> list[torch.Tensor]:
        return [torch.tensor([value + rank, value]).float() for value in values or (1,)]

    def each(name: str, make, *arguments, **named) -> None:
        def call(group):
            tensors = make()
            work = getattr(group, name)(*tensors, *arguments, **named)
            assert work.wait()
            if group is dist.group.WORLD:
                assert work._get_op_type() == int(c10d.OpType.__members__[name.upper()])
            return tensors

        _with_gloo(call)

    op, brief = dist.ReduceOp, timedelta(seconds=20)
    each("allreduce", lambda: xs())
    each("allreduce", lambda: [torch.eye(2) + rank], op.MAX)
    each("allreduce", lambda: xs(), op=op.MIN, timeout=brief)
    for operation in (op.SUM, op.PRODUCT, op.MAX):  # AVG: Gloo divides the first one only
        each("allreduce", lambda: [xs(3)], operation)
    each("allreduce", lambda: [[each.int() for each in xs(6)]], op.BXOR)
    sparse = torch.eye(3).to_sparse()
    _with_gloo(lambda group: (group.allreduce(x := [sparse * rank]).wait(), x))
    each("broadcast", lambda: [xs()])
    each("broadcast", lambda: xs(), root=last)
    options = c10d.BroadcastOptions()
    options.rootRank = last
    each("broadcast", lambda: [xs(3)], opts=options)
    _with_gloo(lambda group: (group.reduce(x := xs()[0], 0, op.MAX, brief).wait(), x if rank == 0 else None))
    each("scatter", lambda: [*xs(), xs(*range(size)) * root], 0)
    each("gather", lambda: [xs(*range(size)) * root, *xs()], root=0, timeout=brief)
    each("reduce_scatter", lambda: [*xs(), xs(*range(size))], op=op.MAX)
    each("allgather", lambda: [xs(*range(size)), *xs()], timeout=brief)
    each("alltoall_base", lambda: [torch.zeros(size), torch.arange(size) + 1.0 * rank], [], [])
    each("barrier", list, timeout=brief)
    each("allreduce_coalesced", lambda: [xs() * 2])
    whole = torch.ones(3)
    dist.group.WORLD.allreduce_coalesced([whole[:2], whole[1:]]).wait()  # both are read before one is written
    assert (whole == size).all()
    _with_gloo(lambda group: dist.broadcast(x := torch.ones(2).bfloat16()[::2], 0, group=group) or x)
    _with_gloo(lambda group: type(group.get_group_store()).__name__)
    split = dist.group.WORLD.split_group([rank], group_name="alone")
    assert (split.size(), split.group_name) == (1, "alone") and split.allreduce(torch.ones(1)).wait()
    other = _dist2.new_group("mpiddp", brief, "cpu")
    other.allreduce(x := torch.ones(1)).wait()
    assert x == size and other.size() == size
    for wrong in (
        lambda group: group.allreduce([]),
        lambda group: group.allgather([], []),
        lambda group: group.allreduce([torch.ones(1), torch.ones(2)]),
        lambda group: group.broadcast(torch.ones(1), root=-1),
        lambda group: group.broadcast(torch.ones(1), 0, 0, 0, 0),
        lambda group: group.allreduce(torch.ones(1), None, 3),
        lambda group: dist.all_reduce(torch.ones(2), op.BAND, group=group),
        lambda group: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * size, [1] * size, group=group),
        lambda group: group.gather([[torch.ones(2)]] * 2, [torch.ones(1)]),
        lambda group: group.scatter([torch.ones(1)] * 2, []),
        lambda group: group.allgather([[torch.ones(1)] * (size + 1)], [torch.ones(1)]),
        lambda group: group.split_group([]),
    ):
        if size != 4:  # whose split sizes would be right
            _with_gloo(wrong, RuntimeError, TypeError)


def check_watched(rank: int, size: int) -> None:
    """torch's dispatcher sees the operations of c10d, as Gloo's, when somebody watches; Gloo's still work."""

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    def watched(call, group):
        with Seen() as mode:
            found = call(group)
        with torch.autograd.profiler.profile() as profile:
            call(group)
        names = {event.name for event in profile.function_events}
        operations = [name for name in mode.names if "c10d" in name]
        return found, operations, {name for name in names if "c10d" in name}

    ones = torch.ones
    for call in (
        lambda group: dist.all_reduce(x := ones(2) * rank, dist.ReduceOp.MAX, group=group) or x,
        lambda group: dist.broadcast(x := ones(2) * rank, size - 1, group=group) or x,
        lambda group: dist.reduce_scatter_single(x := ones(1), ones(size), group=group) or x,
        lambda group: dist.all_gather(x := [ones(1) for _ in range(size)], ones(1) * rank, group=group) or x,
        lambda group: dist.scatter(x := ones(1), [ones(1)] * size if rank == 0 else None, group=group) or x,
        lambda group: dist.all_to_all_single(x := ones(size), ones(size) * rank, group=group) or x,
        lambda group: dist.barrier(group) or 0,
    ):
        _with_gloo(functools.partial(watched, call))
    with Seen():
        work = dist.all_reduce(x := ones(3), async_op=True)
    assert work.wait() and work.is_completed() and work.result()[0] is x and (x == size).all()

    class Calls(Seen):
        """Makes calls of its own before that which it sees, in the same group and in one of Gloo's."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "allreduce" in str(function):
                dist.broadcast(x := ones(2) * rank, size - 1)
                dist.all_reduce(y := ones(2), group=_gloo())
                assert (x == size - 1).all() and (y == size).all()
            return super().__torch_dispatch__(function, types, args, kwargs)

    with Calls(), Seen() as mode:
        dist.all_reduce(x := ones(3))
    assert (x == size).all() and "c10d.allreduce_.default" in mode.names and not torch._C._len_torch_dispatch_stack()
    dist.all_reduce(ones(2, device="meta"))
    with Seen() as mode, torch._C._DisableTorchDispatch():  # as torch.distributed.breakpoint and AOTAutograd
        dist.all_reduce(x := ones(2))
    assert (x == size).all() and not mode.names

    class Other(Seen):
        """Makes another operation of the call."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return torch.ops.c10d.broadcast_(*args[:2], 0, 0)

    with pytest.raises(RuntimeError), Other():  # it is not taken for the sum that was called
        dist.all_reduce(x)
    dist.all_reduce(x := ones(2), group=_gloo())
    assert (x == size).all()
    kernels = torch._C._dispatch_dump("c10d::allreduce_")
    assert "mpiddp" not in kernels, f"Gloo would wait for its lock with the GIL in {kernels}"


def check_resizable(rank: int, size: int) -> None:
    """A tensor's storage stays the program's: FSDP1 frees it and makes it anew."""
    for call in (
        dist.all_reduce,
        lambda t: dist.all_reduce(t, async_op=True).wait(),
        lambda t: dist.broadcast(t, 0),
        lambda t: dist.all_gather_single(torch.empty(8 * size, dtype=t.dtype), t),
        mpiddp.all_reduce,
        lambda t: dist.all_gather_object([None] * size, t),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.ones(8, dtype=dtype)
            call(tensor)
            tensor.resize_(100_000)
            tensor.untyped_storage().resize_(0)
    model = torch.nn.Linear(2, 1)
    model.register_buffer("counts", torch.ones(8))
    mpiddp.torch.DistributedDataParallel(model)
    model.counts.resize_(100_000)


def _same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():  # torch.testing would import sympy, for 1.2 s a rank
        np.testing.assert_allclose(found[name].detach(), value.detach(), rtol=1e-4, atol=1e-5, err_msg=name)


def check_second_round(rank: int, size: int) -> None:
    """All groups end with the default group, which can be made anew."""
    for told in ({}, {"world_size": size}, {"rank": rank}):
        dist.new_group([0])
        dist.destroy_process_group()
        dist.init_process_group("mpiddp", **told)
        dist.all_reduce(x := torch.ones(2))
        assert (x == size).all()


def check_errors(rank: int, size: int) -> None:
    if size == 1:
        return
    error = dist.DistBackendError
    with pytest.raises(error, match="all_reduce") as caught:
        dist.all_reduce(torch.ones(2 + rank))
    assert isinstance(caught.value, mpiddp.MismatchError) and caught.value.ranks
    ended = types.SimpleNamespace(is_completed=lambda: True, exception=lambda: mpiddp.MismatchError("found by a poll"))
    work = Work([ended], (), Loan())
    assert work.is_completed() and isinstance(work.exception(), error)
    dist.destroy_process_group()
    dist.init_process_group("mpiddp", timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(error, match=r" Timed out (?s:.)*\branks? 1\b") as caught:
            dist.all_reduce(torch.ones(2))
        assert isinstance(caught.value, TimeoutError)
    else:
        time.sleep(3)
        dist.all_reduce(torch.ones(2))
    # A call that has timed out keeps no group from its end, as in Gloo.
    dist.destroy_process_group()
    dist.init_process_group("mpiddp")
    part = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:
        with contextlib.suppress(TimeoutError):
            dist.all_reduce(torch.ones(2), group=part)
        with pytest.warns(UserWarning, match="they are given up"):
            dist.destroy_process_group(part)
    else:
        time.sleep(3)  # else rank 0 hears of this call
        with pytest.raises(error, match="all_reduce #1") as caught:
            dist.destroy_process_group(part)
        assert isinstance(caught.value, mpiddp.MismatchError)
    dist.destroy_process_group()
    if rank == 0:
        with pytest.raises(error, match=r"rank 1 .*has not called it") as caught:
            dist.init_process_group("mpiddp", timeout=timedelta(seconds=1))
        assert isinstance(caught.value, TimeoutError)
    else:
        time.sleep(4)
    dist.init_process_group("mpiddp")
    dist.barrier()


warnings.simplefilter("error")
dist.init_process_group("mpiddp")
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size) == (mpiddp.get_rank(), mpiddp.get_world_size())
assert dist.get_backend() == "mpiddp"
for each in [value for name, value in globals().items() if name.startswith("check_")]:
    each(rank, size)
dist.destroy_process_group()
assert not mpiddp.is_initialized()
print("all right")
