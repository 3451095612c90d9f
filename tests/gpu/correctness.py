"""Every operation on CuPy arrays against NumPy, and that streams are waited for."""

import contextlib
import importlib.util
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
from harness.collectives import COLLECTIVES, check
from harness.inputs import draw, dtype_of, reduced

import mpiddp as dist

from .rows import say

Op = dist.ReduceOp
DTYPES = ["float32", "float64", "float16", "int8", "int64", "uint8", "bool", "complex64"]
if importlib.util.find_spec("ml_dtypes"):  # an extra
    DTYPES.append("bfloat16")
OPS = [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX, Op.BOR, Op.PREMUL_SUM(0.5)]


class Checks:
    """Counts what was compared, and keeps the first difference."""

    def __init__(self) -> None:
        self.number, self.first = 0, ""

    def equal(self, what: str, found: Any, expected: np.ndarray) -> None:
        with self.counted():
            np.testing.assert_array_equal(cupy.asnumpy(found).astype(expected.dtype), expected, what)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a comparison that raises AssertionError."""
        self.number += 1
        try:
            yield
        except AssertionError as error:
            self.first = self.first or f"{error} on rank {dist.get_rank()}"

    def report(self, what: str) -> None:
        """Say the numbers of all ranks; collective."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (self.number, self.first))
        faults = [text for _, text in everybody if text]
        say(
            f"{what}: {faults[0]}" if faults else f"{what}: comparisons",
            sum(n for n, _ in everybody),
            wrong=bool(faults),
        )


def correctness(small: bool) -> None:
    """Compare every operation, on short, odd and long arrays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world, checks = SimpleNamespace(rank=rank, size=size, rng=np.random.default_rng(0)), Checks()
    lengths = [0, 1, 1_003, 40_009] if small else [0, 1, 1_003, 40_009, 1_000_003, 12_000_017]
    how: dict[str, Any]
    for name, length, operation in itertools.product(DTYPES, lengths, COLLECTIVES):
        long = length > 10**7
        if long and (name not in ("float32", "float16") or operation not in ("all_reduce", "reduce", "broadcast")):
            continue
        how = {"async_op": True} if (length + len(name)) % 2 == 0 else {}
        for op in OPS if operation == "all_reduce" else [Op.SUM]:
            if length > 2_000 and op.name in ("PRODUCT", "BOR") and name != "int64":
                continue
            if length > 10**6 and op.name not in ("SUM", "MAX"):  # drawing the arrays takes the time
                continue
            with checks.counted():
                check(world, operation, dtype_of(name), (length,), how, op=op, make=cupy.asarray, read=cupy.asnumpy)
    for name, length in itertools.product(DTYPES, lengths[:5]):
        xs = draw(world.rng, size, (length,), dtype_of(name))
        received = cupy.zeros_like(mine := cupy.asarray(xs[rank]))
        request = dist.irecv(received, (rank - 1) % size)
        dist.isend(mine, (rank + 1) % size).wait()
        request.wait()
        checks.equal(f"isend and irecv of {length} {name}", received, xs[(rank - 1) % size])
    checks.report("collectives")


def nodes(small: bool) -> None:
    """Compare all-reduces over pretended nodes."""
    checks = Checks()
    for name in ("float32", "float16", "int64"):
        for length in (40_009, 100_003 if small else 12_000_017):
            xs = draw(np.random.default_rng(length), dist.get_world_size(), (length,), np.dtype(name))
            x = cupy.asarray(xs[dist.get_rank()])
            dist.all_reduce(x)
            checks.equal(f"all_reduce of {length} {name}", x, reduced(Op.SUM, xs))
    checks.report("collectives over pretended nodes")


def order(small: bool) -> None:
    """Queue long kernels right before operations, and kernels right behind them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    checks, long = Checks(), 40 if small else 400
    square = cupy.full((256 if small else 2_048,) * 2, 1e-3, dtype=np.float32)
    for round_ in range(3 if small else 10):
        x = cupy.zeros(100_003, dtype=np.float32)
        for _ in range(long):
            square = square @ square * np.float32(1e-3)
        x += rank + 1 + round_  # behind all of that
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            y = cupy.zeros_like(x)
            dist.recv(y, 0)
            checks.equal("send behind a long kernel", y, np.full(x.size, 1 + round_, np.float32))
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        x *= 2
        total = 2 * sum(each + 1 + round_ for each in range(size))
        checks.equal("all_reduce between kernels", x, np.full(x.size, total, np.float32))
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            z = cupy.zeros(50_001, dtype=np.float32)
            z += rank
            dist.all_reduce(z)
            z += 1
            checks.equal("on a stream of the program's", z, np.full(z.size, size * (size - 1) / 2 + 1, np.float32))
    checks.report("order of streams")
