"""Arrays of other libraries in every operation: no copy, or an error that says why."""

import array
import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness.collectives import COLLECTIVES, check
from harness.faking import fake_gpu
from harness.inputs import both_ways
from harness.learning import import_torch

import mpiddp as dist
from mpiddp import device
from mpiddp.device import half
from mpiddp.mpi import message

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

torch: Any
LENGTHS = [0, 1, 1_001, 300_007]  # nothing, MPI's own way, shared memory


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    """Import it where it is used: every rank collects the tests."""
    global torch
    if not dist.is_initialized():
        dist.init_process_group()
    torch = import_torch()


def interface(x: Any, **changes: Any) -> SimpleNamespace:
    """Return memory under NumPy's interface, as an imaging library offers it, or under CUDA's, as Numba does."""
    name = "__array_interface__" if isinstance(x, np.ndarray) else "__cuda_array_interface__"
    return SimpleNamespace(kept=x, **{name: {**getattr(x, name), **changes}})


def exported(x: Any, capsule: Any) -> SimpleNamespace:
    return SimpleNamespace(kept=x, __dlpack__=capsule, __dlpack_device__=x.__dlpack_device__)


def old_export(x: Any) -> SimpleNamespace:
    """As DLPack before its first version: no capsule says that it may be written to."""
    return exported(x, lambda stream=None: x.__dlpack__())


def read_only_export(x: np.ndarray) -> SimpleNamespace:
    """As JAX: DLPack with the flag that forbids writing."""
    x.flags.writeable = False
    return exported(x, x.__dlpack__)


def test_torch_tensors_in_collectives(world: Any) -> None:
    for name, length, how in itertools.product(COLLECTIVES, LENGTHS, both_ways()):
        check(world, name, np.dtype(np.float32), (length,), how, make=torch.from_numpy, read=torch.Tensor.numpy)


DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]


def test_torch_dtypes(world: Any) -> None:
    for name in DTYPES:
        x = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, name))
        if name != "bool":
            x *= world.rank + 1
        expected = x if name == "bool" else x / (world.rank + 1) * (world.size * (world.size + 1) // 2)
        dist.all_reduce(x)
        assert x.dtype == getattr(torch, name) and torch.equal(x, expected.to(x.dtype)), name


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_memory_is_the_callers(name: str) -> None:
    x = torch.zeros(2, 3, 4, dtype=getattr(torch, name))
    found = message.as_array(x[1], "test")
    assert found.shape == (3, 4) and found.dtype.name == name
    found[1, 2] = 5
    assert float(x[1, 1, 2]) == 5 and float(x.sum()) == 5
    kept = x[1].data_ptr()
    del x
    found += 1  # the tensor's storage lives as long as the array does
    assert found.ctypes.data == kept and float(found.sum()) == 17


def test_numpy_memory_under_torch_is_symmetric_still(world: Any) -> None:
    shared = dist.symmetric_empty(300_000, np.float32)
    assert shared is not None
    x = torch.from_dlpack(shared)
    x[:] = world.rank + 1
    dist.all_reduce(x)
    assert float(shared[0]) == float(x[-1]) == world.size * (world.size + 1) / 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.ones(3, requires_grad=True), "without a copy: Can't export tensors that require gradient, use"),
        (lambda: torch.nn.Parameter(torch.ones(3)), "cannot take this Parameter as `tensor`"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugate bit"),
        (lambda: torch.ones(3).to_sparse(), "torch.strided"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.ones(3, dtype=torch.float8_e4m3fn), "Unsupported dtype"),
        (
            lambda: torch.ones(3, 4).t(),
            "strides (4, 16) as `tensor`; make y = x.contiguous(), pass y, and copy the result back",
        ),
        (lambda: torch.ones(6)[::2], "C-contiguous array, got float32 (3,) with strides (8,)"),
        (lambda: torch.ones(1).expand(4), "C-contiguous"),
        (lambda: torch.ones(6, dtype=torch.bfloat16)[::2], "got bfloat16 (3,) with strides (4,)"),
        (
            lambda: read_only_export(np.ones(3)),
            "a writable array, got float64 (3,) that is read-only as `tensor`; pass y = numpy.array(x) and read the"
            " result from y, or call tree_all_reduce",
        ),
        (lambda: old_export(torch.ones(3)), "that is read-only"),
        (lambda: torch.ones(3, dtype=torch.bfloat16, requires_grad=True), "Can't export tensors that require gradient"),
        (lambda: interface(np.ones(3), data=(np.ones(3).ctypes.data, True)), "that is read-only"),
        (lambda: memoryview(b"abc"), "that is read-only"),
    ],
)
def test_refusals(make: Any, text: str) -> None:
    with pytest.raises(dist.ArrayError) as error:
        dist.all_reduce(make())
    assert text in str(error.value) and "all_reduce" in str(error.value)


def test_what_is_only_read_may_be_read_only(world: Any) -> None:
    rows = [np.zeros(3) for _ in range(world.size)]
    dist.all_gather(rows, read_only_export(np.full(3, float(world.rank))))
    assert np.array_equal(rows, np.repeat(np.arange(float(world.size)), 3).reshape(-1, 3))
    dist.all_gather(rows, old_export(torch.full((3,), 7.0, dtype=torch.float64)))
    assert (np.array(rows) == 7).all()


def test_bfloat16_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    half.bfloat16.cache_clear()
    monkeypatch.setattr(half.importlib, "import_module", missing)
    with pytest.raises(dist.ArrayError, match="pip install ml_dtypes"):
        dist.all_reduce(torch.ones(2, dtype=torch.bfloat16))


def test_buffers_and_interfaces(world: Any) -> None:
    numbers = array.array("d", [1.0, 2.0])
    dist.all_reduce(numbers)
    assert numbers.tolist() == [world.size, 2.0 * world.size]
    kind = ctypes.c_int32 * 3
    integers = kind(1, 2, 3)
    dist.all_reduce(integers)
    assert list(integers) == [world.size, 2 * world.size, 3 * world.size]
    data = bytearray(b"\x01\x02")
    dist.broadcast(data, 0)
    assert data == b"\x01\x02"
    x = np.ones((2, 3))
    dist.all_reduce(interface(x))
    assert (x == world.size).all()


BESIDES = {"__dlpack__": lambda **_: pytest.fail("the device comes first"), "__dlpack_device__": lambda: (2, 0)}
"""The methods of a CUDA tensor of torch's."""


@pytest.mark.parametrize("more", [{}, BESIDES], ids=["Numba's", "torch's"])
def test_gpu_memory_without_cupy(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"shape": (1,), "typestr": "<f4", "data": (64, False), "version": 3}
    monkeypatch.setattr(device.dlpack, "cuda_fault", lambda: "CuPy is not installed: pip install it")
    with pytest.raises(dist.ArrayError, match=r"its memory is on a GPU.*CuPy is not installed"):
        dist.all_reduce(SimpleNamespace(__cuda_array_interface__=there, **more))


@pytest.mark.parametrize("length", [0, 1_001])
def test_gpu_memory_is_used_where_it_lies(world: Any, length: int) -> None:
    with fake_gpu() as cupy:
        how = {"make": lambda x: interface(cupy.asarray(x)), "read": lambda made: made.kept.get()}
        for name in COLLECTIVES:
            check(world, name, np.dtype(np.float64), (length,), **how)
        with pytest.raises(dist.ArrayError, match="C-contiguous"):
            dist.all_reduce(interface(cupy.zeros((3, 4)).T))
        x, rows = cupy.full((length,), 7.0), [cupy.zeros(length) for _ in range(world.size)]
        fixed = interface(x, data=(x.data.ptr, True))
        with pytest.raises(dist.ArrayError, match="writable"):
            dist.all_reduce(fixed)
        dist.all_gather(rows, fixed)
        assert all((row.get() == 7).all() for row in rows)
