"""Inputs of the tests of communication: dtypes, shapes, every rank's arrays, and expected reductions."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

import mpiddp as dist
from mpiddp.mpi import requests

_T = TypeVar("_T")
Op = dist.ReduceOp
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (257,), (31, 37)]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64", "longdouble", "bfloat16"]
COMPLEX = ["complex64", "complex128", "clongdouble"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
CLASSES = ("bool", "int64", "float16", "float32", "complex64")
"""One dtype of each class: booleans, integers, types that are summed in another one, floats, complex numbers."""
OPS = [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR, Op.PREMUL_SUM(0.5)]


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype; skip the test if its package is not installed."""
    if name == "bfloat16":
        import pytest

        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


def thinned(world: Any, dtype: np.dtype[Any], every: Sequence[_T], one: _T) -> Sequence[_T]:
    """Return all sizes for one dtype of each class, one for the others; all of them in the long tier."""
    return every if world.long or dtype.name in CLASSES else [one]


def draw(rng: np.random.Generator, size: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[np.ndarray]:
    """Return an input for each rank, the same on all; sums and products of few are exact in any dtype."""
    if dtype.kind == "b":
        return [np.asarray(rng.integers(0, 2, shape), bool) for _ in range(size)]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return [np.asarray(rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)) for _ in range(size)]
    if dtype.kind == "c":
        return [np.asarray(re + 1j * im, dtype) for re, im in rng.integers(-4, 5, (size, 2, *shape))]
    return [np.asarray(x / 2, dtype) for x in rng.integers(-4, 5, (size, *shape))]


def own_op(op: dist.ReduceOp, rank: int) -> dist.ReduceOp:
    """Return the reduction as a rank is to ask for it: with a factor of its own, if any."""
    return op if op.factor is None else dist.ReduceOp.PREMUL_SUM(op.factor * (rank + 1))


def reduced(op: dist.ReduceOp, xs: list[np.ndarray]) -> np.ndarray:
    """Return the reduction of all ranks' inputs, each by its `own_op`, by NumPy in a wide type of their kind."""
    dtype = xs[0].dtype
    if dtype.kind == "b":
        stack = np.stack(xs)
        if op.name == "BXOR":
            return stack.sum(axis=0) % 2 == 1
        return stack.any(axis=0) if op.name in ("SUM", "MAX", "BOR") else stack.all(axis=0)
    wide = {"i": np.int64, "u": np.uint64, "c": np.clongdouble}.get(dtype.kind, np.longdouble)
    if dtype.itemsize <= 8:
        wide = {np.clongdouble: np.complex128, np.longdouble: np.float64}.get(wide, wide)
    stack = np.stack([x.astype(wide) for x in xs])
    combine = {
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }.get(op.name, np.add)
    if op.factor is not None:
        stack = np.stack([x * wide(own_op(op, rank).factor) for rank, x in enumerate(stack)])
    result = functools.reduce(combine, stack)
    if op.name == "AVG":
        result = result / wide(len(xs))
    return np.asarray(result, wide).astype(dtype)


def means_something(op: dist.ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Return True if torch's reduction is defined on ``dtype``."""
    if op.name in ("AVG", "PREMUL_SUM"):
        return dtype.kind not in "biu"
    if op.name in ("BAND", "BOR", "BXOR"):
        return dtype.kind in "biu"
    return op.name not in ("MIN", "MAX") or dtype.kind != "c"


def same(found: Any, expected: Any) -> bool:
    """Compare shape, dtype and every bit, a NaN being like any other."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool(np.all((found == expected) | ((found != found) & (expected != expected))))


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    """Compare up to the rounding of a few operations in their dtype."""
    if found.dtype.kind in "biu":
        return same(found, expected)
    if same(found, expected):
        return True
    digits = {"float16": 1e-3, "bfloat16": 8e-3}.get(found.dtype.name, 1e-6)
    wide = np.clongdouble if found.dtype.kind == "c" else np.longdouble
    return found.shape == expected.shape and np.allclose(
        found.astype(wide), expected.astype(wide), rtol=digits, atol=digits, equal_nan=True
    )


def both_ways() -> Iterator[dict[str, bool]]:
    """Yield the options of a blocking call, and of an asynchronous one."""
    yield {}
    yield {"async_op": True}


def end(returned: dist.Work | None, options: dict[str, bool]) -> None:
    """Check what a collective returned, and wait if asynchronous."""
    if not options:
        assert returned is None
        assert requests.pending == 0
        return
    assert isinstance(returned, dist.Work)
    assert returned.wait() is True
    assert returned.is_completed()
    assert returned.is_success()
    assert returned.exception() is None


def total(group: dist.ProcessGroup | None, number: float) -> float:
    """Return the sum of the ranks' numbers."""
    x = np.array([float(number)])
    dist.all_reduce(x, group=group)
    return float(x[0])


def finish(works: Iterable[dist.Work]) -> None:
    for each in works:
        each.wait()


def calls(group: Any, size: int = 1, root: int = 0, peer: int = 0) -> dict[str, functools.partial[Any]]:
    """Return a right call of each operation of a group of this size, by name."""
    x, xs, table = (np.ones(shape, np.float32) for shape in (4, (size, 4), 4 * size))
    xs = list(xs)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (x,),
        "reduce": (x, root),
        "broadcast": (x, root),
        "all_gather": (xs, x),
        "gather": (x, xs, root),
        "all_gather_single": (table, x),
        "all_gather_into_tensor": (table, x),
        "scatter": (x, xs, root),
        "reduce_scatter": (x, xs),
        "reduce_scatter_single": (x, table),
        "reduce_scatter_tensor": (x, table),
        "all_to_all": (xs, xs),
        "all_to_all_single": (table, table),
        "barrier": (),
        "monitored_barrier": (),
        "send": (x, peer),
        "recv": (x, peer),
        "isend": (x, peer),
        "irecv": (x, peer),
        "send_object_list": ([1], 0),
        "recv_object_list": ([1], 0),
        "all_gather_object": ([None], 1),
        "gather_object": (1,),
        "broadcast_object_list": ([1], 0),
        "scatter_object_list": ([1],),
        "all_reduce_coalesced": ([x],),
    }
    return {name: functools.partial(getattr(dist, name), *given, group=group) for name, given in arguments.items()}
