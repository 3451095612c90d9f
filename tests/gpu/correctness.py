"""Every operation on CuPy arrays against NumPy, and that streams are waited for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
from harness.inputs import draw, dtype_of, means_something, reduced

import mpiddp as dist

from .rows import say

Op = dist.ReduceOp
DTYPES = ["float32", "float64", "float16", "int8", "int64", "uint8", "bool", "complex64"]
if importlib.util.find_spec("ml_dtypes") and int(cupy.__version__.split(".")[0]) >= 14:  # an extra; CuPy 13 lacks it
    DTYPES.append("bfloat16")
OPS = [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX, Op.BOR, Op.PREMUL_SUM(0.5)]


class Checks:
    """Counts what was compared, and keeps the first difference."""

    def __init__(self) -> None:
        self.number, self.first = 0, ""

    def equal(self, what: str, found: Any, expected: np.ndarray) -> None:
        self.number += 1
        host = found.get() if isinstance(found, cupy.ndarray) else found
        if not self.first and not np.array_equal(
            host.astype(expected.dtype), expected, equal_nan=host.dtype.kind in "fc"
        ):
            self.first = f"{what} on rank {dist.get_rank()}: {host.ravel()[:4]} instead of {expected.ravel()[:4]}"

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


def inputs(dtype: np.dtype[Any], length: int) -> list[np.ndarray]:
    return draw(np.random.default_rng(length), dist.get_world_size(), (length,), dtype)


def run(call: Any, async_op: bool, *args: Any, **options: Any) -> None:
    work = call(*args, async_op=async_op, **options)
    if async_op:
        work.wait()


def cases(lengths: list[int]) -> Iterator[tuple[str, int, bool]]:
    for name in DTYPES:
        for length in lengths:
            yield name, length, (length + len(name)) % 2 == 0


def correctness(small: bool) -> None:
    """Compare every operation, on short, odd and long arrays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [0, 1, 1_003, 40_009] if small else [0, 1, 1_003, 40_009, 1_000_003, 12_000_017]
    checks = Checks()
    for name, length, async_op in cases(lengths):
        dtype = dtype_of(name)
        if length > 10**7 and name not in ("float32", "float16"):
            continue
        xs = inputs(dtype, length)
        for op in (each for each in OPS if means_something(each, dtype)):
            if length > 2_000 and op.name in ("PRODUCT", "BOR") and name != "int64":
                continue
            x = cupy.asarray(xs[rank])
            run(dist.all_reduce, async_op, x, op)
            checks.equal(f"all_reduce {op} of {length} {name}", x, reduced(op, xs))
        x = cupy.asarray(xs[rank])
        run(dist.broadcast, async_op, x, size - 1)
        checks.equal(f"broadcast of {length} {name}", x, xs[-1])
        x = cupy.asarray(xs[rank])
        run(dist.reduce, async_op, x, 0)
        checks.equal(f"reduce of {length} {name}", x, reduced(Op.SUM, xs) if rank == 0 else xs[rank])
        if length > 2_000_000:
            continue
        movers(checks, xs, async_op)
    checks.report("collectives")


def movers(checks: Checks, xs: list[np.ndarray], async_op: bool) -> None:
    """Compare what moves data, reduce-scatter and messages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    what, mine = f"of {xs[0].size} {xs[0].dtype}", cupy.asarray(xs[rank])
    rows = [cupy.zeros_like(mine) for _ in xs]
    run(dist.all_gather, async_op, rows, mine)
    for row, expected in zip(rows, xs, strict=True):
        checks.equal(f"all_gather {what}", row, expected)
    flat = cupy.zeros((size, mine.size), dtype=mine.dtype)
    run(dist.all_gather_single, async_op, flat, mine)
    checks.equal(f"all_gather_single {what}", flat, np.stack(xs))
    part = cupy.zeros_like(mine)
    run(dist.reduce_scatter, async_op, part, [mine.copy() for _ in xs])
    checks.equal(f"reduce_scatter {what}", part, reduced(Op.SUM, xs))
    got = [cupy.zeros_like(mine) for _ in xs]
    run(dist.all_to_all, async_op, got, [mine.copy() for _ in xs])
    for block, expected in zip(got, xs, strict=True):
        checks.equal(f"all_to_all {what}", block, expected)
    gathered = [cupy.zeros_like(mine) for _ in xs] if rank == 0 else None
    run(dist.gather, async_op, mine, gathered, 0)
    for block, expected in zip(gathered or [], xs, strict=False):
        checks.equal(f"gather {what}", block, expected)
    back = cupy.zeros_like(mine)
    run(dist.scatter, async_op, back, gathered, 0)
    checks.equal(f"scatter {what}", back, xs[rank])
    received = cupy.zeros_like(mine)
    request = dist.irecv(received, (rank - 1) % size)
    dist.isend(mine, (rank + 1) % size).wait()
    request.wait()
    checks.equal(f"isend and irecv {what}", received, xs[(rank - 1) % size])


def nodes(small: bool) -> None:
    """Compare all-reduces over pretended nodes."""
    checks = Checks()
    for name in ("float32", "float16", "int64"):
        for length in (40_009, 100_003 if small else 12_000_017):
            xs = inputs(np.dtype(name), length)
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
