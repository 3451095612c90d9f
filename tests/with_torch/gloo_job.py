"""The ranks of `test_other_backends_meet_through_mpi`: Gloo's groups without an address, and beside mpiddp's."""

import os
import re
import socket
import struct
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from harness import without_dynamo  # noqa: F401
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from mpiddp.torch import names
from mpiddp.torch.store import _ask

NOBODY = 65534


def listening() -> set[str]:
    """Return the ports at which this process listens."""
    tables = [Path("/proc/self/net", name).read_text() for name in ("tcp", "tcp6") if Path("/proc/net", name).exists()]
    rows = [line.split() for table in tables for line in table.splitlines()]
    links = " ".join(str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return {row[1] for row in rows if row[3] == "0A" and re.search(rf"socket:\[{row[9]}\]", links)}


def check_nothing_listens(rank: int, size: int) -> None:
    before = listening()  # MPI's own
    dist.init_process_group("mpiddp")
    dist.all_reduce(x := torch.ones(3), group=dist.new_group())
    dist.all_gather_object([None] * size, {"rank": rank})
    dist.barrier()
    assert (x == size).all() and listening() == before
    store = dist.distributed_c10d._get_default_store()
    if rank == size - 1:  # rank 0 computes meanwhile
        store.set("key", "value")
    dist.barrier()
    assert store.get("key") == b"value"
    store.wait(["key"], timedelta(milliseconds=2**31 - 1))  # as torch.distributed.rpc does
    dist.barrier()
    at_a_port = rank == 0 and os.environ["MPIDDP_NODES"].endswith("1")
    assert len(listening() - before) == at_a_port
    dist.destroy_process_group()


def check_strangers(number: int, store: dist.Store) -> None:
    """Another user, who knows the address but not the secret, gets no word."""
    host, port, secret = _ask(number, store.timeout)
    for said, heard in ((secret, True), ("0" * len(secret), False), ("", False), ("0" * 99, False)):
        caller = os.fork()
        if not caller:
            found = False
            if os.getuid() == 0:
                os.setuid(NOBODY)
            found = answered(host, port, said.encode())
            os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(caller, 0)[1]) == heard, said


def answered(host: str, port: int, secret: bytes) -> bool:
    """Return whether the store answers a request that is a pickle of ("num_keys", (), None)."""
    request = b"(Vnum_keys\n(tNt."
    with socket.create_connection(("127.0.0.1", port)) if port else socket.socket(socket.AF_UNIX) as caller:
        if not port:
            caller.connect(host)
        caller.settimeout(20)
        try:
            for message in (secret, request):
                caller.sendall(struct.pack("!i", len(message)) + message)
            return bool(caller.recv(4))
        except ConnectionError:
            return False


def check_groups(rank: int, size: int) -> None:
    """Collectives, objects, DDP, and groups of some ranks, on Gloo and mpiddp at once."""
    expected = size * (size - 1) / 2
    part = dist.new_group([0, size - 1], backend="gloo")
    ours = dist.new_group(backend="mpiddp")
    for group in (None, ours):
        dist.all_reduce(x := torch.full((3,), float(rank)), group=group)
        assert (x == expected).all()
        dist.all_gather_object(found := [None] * size, {"rank": rank}, group)
        assert [each["rank"] for each in found] == list(range(size))
        model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        model(torch.full((4, 2), float(rank))).mean().backward()
        assert torch.allclose(model.module.weight.grad, torch.full((1, 2), expected / size))
    if rank in (0, size - 1):
        dist.broadcast_object_list(found := [rank], 0, part)
        assert found == [0]
    dist.barrier()


class OnDevice(torch.Tensor):
    device = property(lambda self: torch.device("cuda", 0))


def check_by_device(rank: int, size: int) -> None:
    """CPU tensors and objects go through mpiddp, tensors that say they are on a GPU through Gloo."""
    for group in (dist.group.WORLD, dist.new_group(list(range(size))[1:])):
        if not isinstance(group, dist.ProcessGroup):
            continue
        gloo = group._get_backend(torch.device("cuda"))
        assert group._get_backend(torch.device("cpu")) is group and gloo.name() == "gloo"
        assert [each.type for each in group._device_types] == ["cpu", "cuda"]
        group.others._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        calls = group._get_sequence_number_for_group(), gloo._get_sequence_number_for_group()
        dist.all_reduce(x := torch.ones(2), group=group)
        dist.all_gather_object([None] * group.size(), "object", group)
        dist.barrier(group)
        ours, theirs = group._get_sequence_number_for_group(), gloo._get_sequence_number_for_group()
        assert (x == group.size()).all() and ours > calls[0] + 2 and theirs == calls[1]
        x = torch.ones(2)
        dist.all_reduce(x.as_subclass(OnDevice), group=group)
        group.broadcast(y := torch.full((2,), float(rank)).as_subclass(OnDevice), root=0).wait()
        root = dist.get_global_rank(group, 0)
        assert (x == group.size()).all() and (y.as_subclass(torch.Tensor) == root).all()
        assert (group._get_sequence_number_for_group(), gloo._get_sequence_number_for_group()) == (ours, theirs + 2)
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((4, 2), float(rank))).mean().backward()
    assert torch.allclose(model.module.weight.grad, torch.full((1, 2), (size - 1) / 2))


rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
socket.setdefaulttimeout(0.1)  # the store's sockets wait longer
check_nothing_listens(rank, size)
dist.init_process_group("gloo")
check_groups(rank, size)
store = dist.distributed_c10d._get_default_store()
while isinstance(store, dist.PrefixStore):
    store = store.underlying_store
if rank == 1:
    check_strangers(store._number, store)
dist.barrier()
dist.destroy_process_group()
for backend in ("cpu:mpiddp,cuda:gloo", "cuda:gloo,cpu:mpiddp"):
    dist.init_process_group(backend)
    check_by_device(rank, size)
    dist.destroy_process_group()
names.replace(["mpi"])  # as the runner does
dist.init_process_group("cpu:mpi,cuda:gloo")
check_by_device(rank, size)
assert dist.get_backend() == "cpu:mpi,cuda:gloo"
dist.destroy_process_group()
print("all right")
