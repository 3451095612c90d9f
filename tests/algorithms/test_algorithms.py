"""Every algorithm against NumPy, on every reduction, dtype and odd size, on one node and on pretended ones."""

import copy
import dataclasses
import errno
import functools
import gc
import importlib.util
import itertools
import mmap
import subprocess
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.inputs import CLASSES, OPS, own_op, reduced
from harness.pretend import connect

import mpiddp as dist
from mpiddp.algorithms import exchange, hierarchical, local_reduce, peer_access, plan, two_shot
from mpiddp.distributed.groups import default_group
from mpiddp.faults.calls import NO_ROOT, make_call
from mpiddp.mpi import message, requests
from mpiddp.mpi.link import Link
from mpiddp.mpi.operation import Call, Operation
from mpiddp.mpi.reduction import ReduceOp, check, is_half, mpi_op
from mpiddp.shm import cma, segment
from mpiddp.shm.cma import CrossMemory
from mpiddp.shm.eager import EagerBuffers
from mpiddp.shm.scratch import Scratch

pytestmark = pytest.mark.mpi(min_size=2)

Array = Any
_FLOATING = ("float32", "float64", "float16", "longdouble", "complex64")
DTYPES = [np.dtype(name) for name in (*_FLOATING, "int8", "int64", "uint16", "bool")]
if importlib.util.find_spec("ml_dtypes"):
    import ml_dtypes

    DTYPES.append(np.dtype(ml_dtypes.bfloat16))
NODES = {"one node": "0000", "two nodes": "0011", "cyclic": "0101", "uneven": "0010", "a node each": "0123"}
KINDS = ("ordinary", "symmetric", "mixed")
IN_MEMORY = ("two_shot", "scratch", "attach", "hierarchical")
POOL_BYTES = 1 << 21


@dataclasses.dataclass
class Case:
    """A group on pretended nodes, and memory for arrays."""

    link: Link
    pool: Array
    """Bytes; the ranks of a node share them."""
    rng: np.random.Generator
    """The same on all ranks."""
    long: bool
    """The long tier runs."""

    def array(self, like: Array, kind: str = "ordinary", shift: int = 0) -> Array:
        """Return a copy of an array in memory of a kind; mixed: every other rank's is symmetric."""
        if kind == "ordinary" or (kind == "mixed" and self.link.rank % 2):
            return like.copy()
        x = self.pool[16 * shift : 16 * shift + like.nbytes].view(like.dtype).reshape(like.shape)
        x[...] = like
        return x

    def run(self, steps: requests.Steps, submitted: bool = False) -> None:
        """Run steps as a blocking or as an asynchronous operation does."""
        if submitted:
            self.link.queue.submit(steps, Operation(Call(self.link.members, "test")), []).wait()
        else:
            requests.drive(steps)

    def rows(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        shape = (self.link.size, count)
        if dtype.kind == "b":
            return list(self.rng.integers(0, 2, shape).astype(dtype))
        if dtype.kind in "iu":
            return list(self.rng.integers(0, 100, shape).astype(dtype))
        return list(self.rng.uniform(0.5, 1.5, shape).astype(dtype))


@pytest.fixture(params=NODES, scope="module")
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if not dist.is_initialized():
        dist.init_process_group()
    group = default_group()
    nodes = tuple(int(node) for node in NODES[request.param][: group.size()])
    if request.param != "one node" and (len(set(nodes)) == 1 or (request.param == "cyclic" and group.size() < 3)):
        pytest.skip("needs more ranks")
    if request.param == "uneven" and group.size() == 3:
        pytest.skip("as two nodes")
    if request.param == "one node" and group.size() == 4 and not request.config.option.long:
        pytest.skip("two and three ranks do here; four make two nodes of two")
    link, _ = connect(nodes)
    pool = np.empty(POOL_BYTES, np.uint8)
    if link.shares_memory:
        found = requests.drive(segment.allocate(link.node, link, POOL_BYTES))
        assert not found.fault
        segment.register(found, link.node.ranks, link.node.rank)
        pool = np.frombuffer(found.memory, np.uint8, POOL_BYTES, link.node.rank * POOL_BYTES)
    yield Case(link, pool, np.random.default_rng(zlib.crc32(request.param.encode())), request.config.option.long)
    link.close()


ON_ONE_NODE = pytest.mark.parametrize("case", ["one node"], indirect=True)
"""Several nodes do the same in each."""


def expect(result: Array, expected: Array, ranks: int, what: str) -> None:
    """Compare, with the error of a sum in the result's type; a half type is rounded once."""
    dtype = result.dtype
    if dtype.kind in "biu":
        assert np.array_equal(result, expected.astype(dtype)), what
        return
    epsilon = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(dtype.name)
    epsilon = 3 * epsilon if epsilon else 4 * ranks * float(np.finfo(dtype).eps)
    wide = np.clongdouble if dtype.kind == "c" else np.longdouble
    assert np.allclose(result.astype(wide), expected.astype(wide), rtol=epsilon, atol=0), what


def bits(x: Array) -> int:
    if x.dtype.char == "g":  # 80 bits, and padding that is anything
        high = x.astype(np.float64)
        x = np.stack([high, (x - high).astype(np.float64)])
    return zlib.crc32(x.tobytes())


def algorithms(operation: str, link: Link) -> list[str]:
    """Return the tested algorithms: on several nodes only what knows of nodes, on one what does not."""
    if not link.one_node:
        return ["hierarchical"] if "hierarchical" in plan.offering(operation) else []
    left_out = {"hierarchical"} if link.find(EagerBuffers) else {"hierarchical", "one_shot"}
    return [name for name in plan.offering(operation) if name not in left_out]


def steps(operation: str, name: str, link: Link, *args: Any) -> requests.Steps:
    output, x = args[0], args[1 if operation in ("reduce_scatter", "all_gather") else 0]
    op = next((arg for arg in args if isinstance(arg, ReduceOp)), None)
    root = args[1] if operation in ("reduce", "broadcast") else NO_ROOT
    if name == "one_shot":
        made = plan.make(link, operation, name, output, x, op, root)
        return made.steps(link, made.call, *args)
    function = getattr(plan.MODULES[name], operation)
    if name not in IN_MEMORY:
        return function(link, *args)  # type: ignore[no-any-return]
    call = make_call(link, operation, (x,), op=op, count=x.size, root=root)
    return function(link, call, *args)  # type: ignore[no-any-return]


def reductions(name: str, dtype: np.dtype[Any]) -> Iterator[ReduceOp]:
    """Yield the reductions that an algorithm can do on a dtype."""
    for op in OPS:
        try:
            check(dtype, op)
        except TypeError:
            continue
        if name != "native" or mpi_op(dtype, op) is not None:
            yield op


def dtypes(case: Case) -> Sequence[np.dtype[Any]]:
    """Return one dtype of each class; all of them on one and two ranks, for kernels know nothing of their number."""
    return DTYPES if case.long or case.link.size < 3 else [dtype for dtype in DTYPES if dtype.name in CLASSES]


def sizes(case: Case, dtype: np.dtype[Any]) -> Sequence[int]:
    every = (0, 1, case.link.size - 1, case.link.size + 1, 1009)
    return every if case.long or dtype.name in ("bool", "float32") else (case.link.size + 1, 1009)


def variants(name: str) -> Iterator[tuple[str, int, bool, int]]:
    """Yield kinds of memory, shifts in it, whether to submit, and a number that grows, for ever.

    Kinds matter to algorithms in shared memory only. There is another number of variants than of sizes, so all meet.
    """
    kinds = KINDS if name in IN_MEMORY else ("ordinary",)
    for index in itertools.count():
        yield kinds[index % len(kinds)], index % 7, index // len(kinds) % 2 == 1, index


def operate(
    case: Case,
    operation: str,
    name: str,
    rows: list[Array],
    op: ReduceOp,
    *,
    root: int = 0,
    kind: str = "ordinary",
    shift: int = 0,
    submitted: bool = False,
    within: bool = False,
) -> int:
    """Run an operation on a row of each rank, compare its result, and return the result's bits.

    ``within``: the input is a part of the output, or the other way round.
    """
    link, what = case.link, f"{operation} by {name} {op} {rows[0].dtype} {rows[0].size} {kind} {submitted} root={root}"
    mine, own = rows[link.rank], own_op(op, link.rank)
    x = case.array(mine, kind, shift)
    part = slice(link.rank * (mine.size // link.size), (link.rank + 1) * (mine.size // link.size))
    gathered = np.zeros_like(np.stack(rows))
    if within and operation == "all_gather":
        gathered = case.array(gathered, kind, shift)
        x = gathered[link.rank]
        x[...] = mine
    arguments, result, expected = {
        "all_reduce": lambda: ((x, own), x, reduced(op, rows)),
        "reduce": lambda: ((x, root, own), x, reduced(op, rows) if link.rank == root else mine),
        "reduce_scatter": lambda: (
            (output := x[part] if within else np.empty_like(mine[part]), x, own),
            *(output, reduced(op, rows)[part]),
        ),
        "all_gather": lambda: ((gathered, x), gathered, np.stack(rows)),
        "broadcast": lambda: ((x, root), x, rows[root]),
    }[operation]()
    case.run(steps(operation, name, link, *arguments), submitted)
    if operation in REDUCING and (operation != "reduce" or link.rank == root):
        expect(result, expected, link.size, what)
    else:
        assert np.array_equal(result, expected), what
    assert result is x or within or np.array_equal(x, mine), f"{what}: the input changed"
    return bits(result)


REDUCING = ("all_reduce", "reduce", "reduce_scatter")


@pytest.mark.core
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("operation", plan.ONE_NODE)
def test_operation(case: Case, operation: str) -> None:
    link, reducing = case.link, operation in REDUCING
    in_blocks = operation in ("all_gather", "reduce_scatter")
    for name in algorithms(operation, link):
        ways, seen = variants(name), []
        for dtype in dtypes(case) if reducing else [*dtypes(case), np.dtype("datetime64[s]"), np.dtype("i4,f8")]:
            ops = reductions(name, dtype) if reducing else OPS[:1]
            withins = (False, True) if in_blocks and dtype == np.float32 else (False,)
            for within, op, count in itertools.product(withins, ops, sizes(case, dtype)):
                kind, shift, submitted, index = next(ways)
                if reducing:
                    rows = case.rows(count * (link.size if operation == "reduce_scatter" else 1), dtype)
                else:
                    rows = list(case.rng.integers(0, 99, (link.size, count)).astype("int8").astype(dtype))
                where = {"root": index % link.size, "kind": kind, "shift": shift + link.rank, "submitted": submitted}
                seen.append(operate(case, operation, name, rows, op, within=within, **where))
        if operation == "all_reduce":
            assert all(told == seen for told in link.now.allgather(seen)), f"ranks differ in their bits by {name}"


@pytest.mark.core
@pytest.mark.ranks(3)
@ON_ONE_NODE
def test_exchange_of_arrays_longer_than_mpi_can_count(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, reduce_rows = [], exchange.reduce_rows
    monkeypatch.setattr(message, "MAX_COUNT", 40)
    monkeypatch.setattr(
        exchange, "reduce_rows", lambda op, rows, *rest: lengths.append(rows[0].size) or reduce_rows(op, rows, *rest)
    )
    for operation, count, op in itertools.product(REDUCING, (1, 10, 105), (OPS[0], OPS[-1])):
        rows = case.rows(count * case.link.size, np.dtype(np.float16))
        for submitted in (False, True):
            operate(case, operation, "exchange", rows, op, root=case.link.size - 1, submitted=submitted)
    assert max(lengths) <= 40 // 4, "the bytes of float32"


def ones(operation: str, x: Array, size: int) -> tuple[Array, ...]:
    """Return arguments of an operation on an array of ones."""
    output = np.empty(len(x) // size if operation == "reduce_scatter" else len(x) * size, x.dtype)
    return {
        "all_reduce": (x, ReduceOp.SUM),
        "reduce": (x, 0, ReduceOp.SUM),
        "reduce_scatter": (output, x, ReduceOp.SUM),
        "all_gather": (output, x),
        "broadcast": (x, 0),
    }[operation]


@pytest.mark.parametrize("operation", plan.ONE_NODE)
def test_no_array_is_kept_alive_after_its_operation(case: Case, operation: str) -> None:
    """A circle of references would keep it until Python looks for garbage."""
    gc.disable()
    try:
        for name, count in itertools.product(algorithms(operation, case.link), (10, 50_000)):
            arguments = ones(operation, np.ones(count * case.link.size), case.link.size)
            for submitted in (False, True):
                case.run(steps(operation, name, case.link, *arguments), submitted)
            kept = [weakref.ref(each) for each in arguments if isinstance(each, np.ndarray)]
            del arguments
            assert not any(each() is not None for each in kept), f"{name} of {count}"
    finally:
        gc.enable()


def test_nan_reaches_every_rank(case: Case) -> None:
    for operation in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
        for name in algorithms("all_reduce", case.link):
            for holder in range(case.link.size):
                for dtype in (np.float32, *(each for each in DTYPES if is_half(each))):
                    if name == "native" and (operation is not ReduceOp.SUM or is_half(np.dtype(dtype))):
                        continue
                    x = np.full(100, 1.0 + case.link.rank, dtype)
                    if case.link.rank == holder:
                        x[holder::7] = np.nan
                    case.run(steps("all_reduce", name, case.link, x, operation))
                    where = np.arange(holder, 100, 7)
                    assert np.array_equal(np.flatnonzero(np.isnan(x)), where), (name, operation, dtype)


@pytest.fixture(params=["copied by the kernel", "by the scratch", "by messages"])
def way(request: pytest.FixtureRequest, case: Case, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let ordinary arrays of any length go one way only, in short pieces."""
    monkeypatch.setattr(two_shot, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(peer_access, "PIECE_BYTES", 1024)
    monkeypatch.setattr(hierarchical, "PIECE_BYTES", 1024)
    monkeypatch.setattr(hierarchical, "_PART_BYTES", 256)
    monkeypatch.setattr(local_reduce, "CHUNK_BYTES", 256)
    if request.param != "copied by the kernel":
        monkeypatch.setattr(case.link.resource(CrossMemory), "fault", "not in this test")
    if request.param == "by messages":
        monkeypatch.setattr(case.link.resource(Scratch), "fault", "not in this test")
        monkeypatch.setattr(case.link.resource(Scratch), "ready", False)
    return str(request.param)


def test_every_way_of_ordinary_arrays(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    read = CrossMemory.read
    monkeypatch.setattr(CrossMemory, "read", lambda self, rank, *where: copies.append(rank) or read(self, rank, *where))
    link, size = case.link, case.link.size
    name = "hierarchical"
    if link.one_node:
        name = {"copied by the kernel": "attach", "by the scratch": "scratch"}.get(way, "two_shot")
    cases = itertools.product(
        (np.dtype("float32"), np.dtype("float16"), np.dtype("int8")), (0, 63, 3001), (ReduceOp.SUM, OPS[-1])
    )
    for number, (dtype, count, op) in enumerate(cases):
        if op.factor is not None and dtype.kind == "i":
            continue
        rows, where = case.rows(count * size, dtype), {"root": count % size, "submitted": bool(number // 2 % 2)}
        for operation in plan.ONE_NODE if link.one_node else ["all_reduce"]:
            operate(case, operation, name, rows, op, **where)
    if link.resource(CrossMemory).fault in ("", "not in this test"):
        assert any(link.now.allgather(bool(copies))) == (way == "copied by the kernel" and len(set(link.nodes)) < size)


def test_memory_that_is_gone_is_an_error(case: Case) -> None:
    memory, node, x = CrossMemory(case.link), case.link.node, np.empty(8, np.uint8)
    if not requests.drive(memory.prepare()):
        pytest.skip(f"the kernel does not copy between processes here: {memory.fault}")
    rank = (node.rank + 1) % node.size
    for reached in (memory.read, memory.write):
        with pytest.raises(cma.UnreachableError, match=rf"rank {node.ranks[rank]}, process \d+, .*\(Bad address\)"):
            reached(rank, 0, x.ctypes.data, x.nbytes)
    dead = subprocess.Popen(["true"])
    dead.wait()
    memory._pids[rank] = dead.pid
    with pytest.raises(cma.UnreachableError, match=rf"rank {node.ranks[rank]}, process {dead.pid}, .*No such"):
        memory.read(rank, x.ctypes.data, x.ctypes.data, x.nbytes)


@ON_ONE_NODE
@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter"])
def test_a_reduction_has_the_same_bits_by_every_way_through_memory(case: Case, operation: str) -> None:
    link = case.link
    ways = [(name, "ordinary") for name in ("one_shot", "scratch", "attach") if name in algorithms(operation, link)]
    for dtype, count in itertools.product(dtypes(case), (7, 20_001)):
        for op in (*reductions("scratch", dtype), *([ReduceOp.PREMUL_SUM(0.3)] if dtype.name == "float32" else [])):
            rows = case.rows(count * link.size, dtype)
            if dtype.kind not in "biu":  # of both signs: sums depend on the order
                rows = [(row - 1).astype(dtype) for row in rows]
            seen = {}
            for name, kind in [*ways, ("two_shot", "symmetric")]:
                x = case.array(rows[link.rank], kind, link.rank)
                output = np.empty(count, dtype) if operation == "reduce_scatter" else x
                args = {"all_reduce": (x, op), "reduce": (x, 0, op), "reduce_scatter": (output, x, op)}[operation]
                case.run(steps(operation, name, link, *args))
                seen[name] = output.copy()
            if (dtype == np.float32 or is_half(dtype)) and op.name in ("SUM", "AVG", "PREMUL_SUM"):
                wide = [row.astype(np.float32) * np.float32(op.factor or 1) for row in rows]
                sums = functools.reduce(np.add, wide) / np.float32(link.size if op is ReduceOp.AVG else 1)
                whole = sums.astype(dtype)
                seen["NumPy"] = whole.reshape(link.size, -1)[link.rank] if operation == "reduce_scatter" else whole
            if operation != "reduce" or link.rank == 0:
                assert len({bits(each) for each in seen.values()}) == 1, f"{dtype} {op} {count}"


@ON_ONE_NODE
def test_attach_reads_arrays_that_may_only_be_read_and_pages_that_nobody_has_touched(
    case: Case, tmp_path: Path
) -> None:
    link, count = case.link, 50_001
    row = np.full(count, 1.0 + link.rank, np.float32)
    row.tofile(tmp_path / "row")
    mapped = np.memmap(tmp_path / "row", np.float32, "r")
    private = np.memmap(tmp_path / "row", np.float32, "c")[1:]
    frozen = row[1:]
    frozen.flags.writeable = False
    untouched = np.frombuffer(mmap.mmap(-1, 4 * count), np.float32)
    for x, value in ((mapped, 1 + link.rank), (private, 1 + link.rank), (frozen, 1 + link.rank), (untouched, 0)):
        output = np.frombuffer(mmap.mmap(-1, 4 * x.size * link.size), np.float32).reshape(link.size, x.size)
        case.run(steps("all_gather", "attach", link, output, np.asarray(x)))
        expected = np.arange(link.size) + 1 if value else np.zeros(link.size)
        assert (output == expected[:, None]).all()
    case.run(steps("all_reduce", "attach", link, private, ReduceOp.SUM))
    assert (private == link.size * (link.size + 1) / 2).all()
    assert (np.fromfile(tmp_path / "row", np.float32) == 1 + link.rank).all(), "a private mapping has reached its file"


@ON_ONE_NODE
@pytest.mark.parametrize("name", ["scratch", "attach"])
def test_an_array_may_be_written_as_soon_as_its_call_has_returned(case: Case, name: str) -> None:
    link, count = case.link, 60_000
    x, output = np.empty(count), np.empty((link.size, count))
    total = link.size * (link.size + 1) / 2
    for step in range(20):
        x[...] = (link.rank + 1) * step
        case.run(steps("all_reduce", name, link, x, ReduceOp.SUM))
        assert (x == total * step).all()
        x[...] = link.rank + step
        case.run(steps("all_gather", name, link, output, x))
        x[...] = -1
        assert (output == np.arange(link.size)[:, None] + step).all()
        x[...] = step if link.rank == step % link.size else -1
        case.run(steps("broadcast", name, link, x, step % link.size))
        assert (x == step).all()


def test_where_the_kernel_does_not_copy_all_ranks_know(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    link = case.link
    if link.rank == link.size - 1:
        monkeypatch.setattr(cma, "attempt", lambda *told: errno.EPERM)
    memory = CrossMemory(link)
    assert not requests.drive(memory.prepare()) and "not permitted" in memory.fault
    monkeypatch.undo()
    assert not requests.drive(memory.prepare()), "and it is not tried again"


@ON_ONE_NODE
def test_a_rank_that_is_late_in_the_queue_puts_its_array_when_it_comes(case: Case) -> None:
    # Some ranks' first pieces are in the scratch when they meet, and others' are not.
    link = case.link
    rng = np.random.default_rng(3)
    for count in rng.integers(1, 5000, 40):
        first, second = (np.full(count, 1.0 + link.rank) for _ in range(2))
        submitted = [
            link.queue.submit(
                steps("all_reduce", "two_shot", link, x, ReduceOp.SUM), Operation(Call(link.members, "test")), [x]
            )
            for x in (first, second)[: 2 if link.rank % 2 else 1]
        ]
        for each in submitted:
            each.wait()
        if not link.rank % 2:
            case.run(steps("all_reduce", "two_shot", link, second, ReduceOp.SUM))
        for x in (first, second):
            assert (x == link.size * (link.size + 1) / 2).all()


def test_half_types_are_accumulated_in_float32_and_rounded_once(case: Case, way: str) -> None:
    # 2048 + 1 is 2048 in float16, so ones that are added one by one would be lost; 2^20 and 80,000 are infinite.
    if case.link.size < 3:
        pytest.skip("needs three numbers")
    ones = np.float16(2048 if case.link.rank == 0 else 1)
    power = 2.0 ** (10 if case.link.rank < case.link.size - case.link.size // 2 else -10)
    product = 2.0 ** (10 * (case.link.size % 2))
    for name in algorithms("all_reduce", case.link):
        for kind in KINDS if name != "native" else ():
            for op, own, expected in (
                (ReduceOp.SUM, ones, 2048 + case.link.size - 1),
                (ReduceOp.PRODUCT, power, product),
                (ReduceOp.AVG, 40_000, 40_000),
            ):
                x = case.array(np.full(70, own, np.float16), kind)
                case.run(steps("all_reduce", name, case.link, x, op))
                assert (x == np.float16(expected)).all(), f"{name} {op} {kind} {way}"


class Recording:
    def __init__(self, comm: Any, name: str, calls: list[str]) -> None:
        self._comm, self._name, self._calls = comm, name, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(self._name)
        return getattr(self._comm, name)


def recording(link: Link, calls: list[str]) -> Link:
    """Return a link that notes on which communicators something is sent."""

    def record(channel: Any, prefix: str) -> Any:
        changed = copy.copy(channel)
        changed.now = Recording(channel.now, f"{prefix}now", calls)
        changed.later = Recording(channel.later, f"{prefix}later", calls)
        return changed

    recorded: Link = record(link, "")
    recorded.node = recorded if link.one_node else record(link.node, "node ")
    recorded.across = None if link.across is None else record(link.across, "across ")
    return recorded


@pytest.mark.core
@pytest.mark.ranks(3)
def test_what_follows_the_first_wait_is_sent_on_later(case: Case) -> None:
    calls: list[str] = []
    link = recording(case.link, calls)
    size, rank = link.size, link.rank
    for operation in plan.ONE_NODE:
        for name in algorithms(operation, case.link):
            for kind in KINDS:
                x = case.array(np.ones(64 * size, np.float32), kind)
                running = steps(operation, name, link, *ones(operation, x, size))
                calls.clear()
                awaited = next(running, None)  # None at once where all ranks have arrived
                first = set(calls)
                calls.clear()
                while awaited is not None:
                    awaited.Wait()
                    awaited = next(running, None)
                what = f"{name} {operation} {kind} on rank {rank}"
                assert all(call.endswith("now") for call in first), f"{what} sends {first} when it is submitted"
                assert all(call.endswith("later") for call in calls), f"{what} sends {set(calls)} in later steps"


def test_every_run_has_the_same_bits(case: Case) -> None:
    rows = case.rows(5003, np.dtype("float32"))
    for name in algorithms("all_reduce", case.link):
        if name == "native":
            continue
        seen = set()
        for _ in range(3):
            for kind in KINDS if name == "two_shot" else KINDS[:1]:
                x = case.array(rows[case.link.rank], kind)
                case.run(steps("all_reduce", name, case.link, x, ReduceOp.SUM))
                seen.add(x.tobytes())
        assert len(seen) == 1, name
