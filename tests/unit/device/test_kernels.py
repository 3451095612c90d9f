"""The sources of the kernels, compiled for the processor and run on every dtype, and for a GPU if NVRTC is there."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest

from mpiddp.device import kernels

ml_dtypes = pytest.importorskip("ml_dtypes")

TYPES = {
    "bool": "bool",
    "int8": "signed char",
    "uint16": "unsigned short",
    "int64": "long long",
    "float16": "unsigned short",
    "bfloat16": "unsigned short",
    "float32": "float",
    "float64": "double",
}
"""C++'s names; half types come as their bits."""
ARITHMETIC = ("add", "multiply", "minimum", "maximum")
BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor")
WAYS = [(False, False), (True, False), (False, True), (True, True)]
"""With factors, with a divisor."""

# What a device has and a processor has not. Conversions of float16 are instructions of the GPU there.
HOST = """
#include <cstring>
#define __device__ static inline
static float __uint_as_float(unsigned int x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned int __float_as_uint(float x) { unsigned int y; memcpy(&y, &x, 4); return y; }
"""
FLOAT16_ON_HOST = """
static float from_float16(unsigned short x) { _Float16 y; memcpy(&y, &x, 2); return y; }
static unsigned short to_float16(float x) { _Float16 y = x; unsigned short z; memcpy(&z, &y, 2); return z; }
"""


def cases() -> list[tuple[str, str, bool, bool]]:
    found = []
    for name in TYPES:
        integral = name[0] in "biu" and name != "bfloat16"
        combines = (*ARITHMETIC, *(BITWISE if integral else ()))
        ways = WAYS[:1] if integral else WAYS
        found += [(name, combine, *way) for combine, way in itertools.product(combines, ways)]
    return found


HALVES = ("float16", "bfloat16")
WIDE = [(name, narrow) for name in HALVES for narrow in ((True, False), (False, True))]
"""Folds of half types whose results, or whose rows, are float32."""


def functions(declared: str, only: str | None = None) -> str:
    """Return all functions, or those of a dtype, that do a kernel's operation."""
    plain = [(*case, (True, True)) for case in cases()]
    wide = [(name, "add", False, True, narrow) for name, narrow in WIDE]
    return "\n".join(
        function(number, *case, declared)
        for number, case in enumerate([*plain, *wide])
        if only is None or case[0] == only
    )


def function(
    number: int, name: str, combine: str, factored: bool, divided: bool, narrow: tuple[bool, bool], declared: str
) -> str:
    """Return a function that does a kernel's operation for each element, as CuPy wraps it."""
    made = kernels.source(name, combine, 3, 2, factored, divided, narrow)
    wide = {"float16": "float", "bfloat16": "float"}.get(name, TYPES[name])
    fields = [each.split() for each in f"{made['in_params']}, {made['out_params']}".split(",")]
    arguments, body = [], []
    for kind, field in fields:
        if field[0] in "xy":
            constant = "const " if field[0] == "x" else ""
            arguments.append(f"{constant}{TYPES[kind]}* p_{field}")
            body.append(f"{constant}{TYPES[kind]} &{field} = p_{field}[i];")
        else:
            arguments.append(f"{wide} {field}")
    loop = "for (long long i = 0; i < count; ++i)" if declared.startswith('extern "C" void') else "long long i = 0;"
    return (
        f"{declared} k{number}({', '.join([*arguments, 'long long count'])})"
        f" {{ {loop} {{ {' '.join(body)} {made['operation']} }} }}"
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    text = HOST + kernels.source("bfloat16", "add", 1, 1, False, False)["preamble"] + FLOAT16_ON_HOST
    text = text.replace("template<> static inline", "template<> inline").replace("template<> __device__", "template<>")
    text += functions('extern "C" void')
    (folder / "kernels.cpp").write_text(text)
    command = [compiler, "-O0", "-shared", "-fPIC", "-o", folder / "kernels.so", folder / "kernels.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "_Float16" in done.stderr:
        pytest.skip("the C++ compiler knows no _Float16")
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(folder / "kernels.so"))


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def draw(rng: np.random.Generator, dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind == "b":
        return rng.integers(0, 2, 512).astype(bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, 512, dtype, endpoint=True)
    x = (rng.standard_normal(512) * 10.0 ** rng.integers(-3, 4, 512)).astype(dtype)
    x[rng.integers(0, 512, 40)] = np.nan
    x[rng.integers(0, 512, 10)] = np.inf
    return x


@pytest.mark.parametrize("name", TYPES)
def test_operation(compiled: Any, name: str) -> None:
    rng, dtype = np.random.default_rng(5), dtype_of(name)
    wide = np.dtype(np.float32) if name in ("float16", "bfloat16") else dtype
    number_type = {4: ctypes.c_float, 8: ctypes.c_double}.get(wide.itemsize, ctypes.c_float)
    for number, (kind, combine, factored, divided) in enumerate(cases()):
        if kind != name:
            continue
        rows, outs = [draw(rng, dtype) for _ in range(3)], [np.empty(512, dtype) for _ in range(2)]
        factors = [0.5, -3.0, 1.25]
        numbers = [number_type(factor) for factor in factors] if factored else []
        numbers += [number_type(7.0)] if divided else []
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in rows]
        results = [x.ctypes.data_as(ctypes.c_void_p) for x in outs]
        getattr(compiled, f"k{number}")(*pointers, *numbers, *results, ctypes.c_longlong(512))
        with np.errstate(all="ignore"):
            parts = [x.astype(wide) for x in rows]
            if factored:
                parts = [part * wide.type(factor) for part, factor in zip(parts, factors, strict=True)]
            wanted = functools.reduce(getattr(np, combine), parts)
            wanted = (wanted / wide.type(7) if divided else wanted).astype(dtype)
        for out in outs:
            assert np.array_equal(out, wanted, equal_nan=dtype.kind not in "biu"), (combine, factored, divided)


@pytest.mark.parametrize("narrow", [(True, False), (False, True)], ids=["first", "last"])
@pytest.mark.parametrize("name", HALVES)
def test_sums_of_half_types_may_stay_wide(compiled: Any, name: str, narrow: tuple[bool, bool]) -> None:
    """The first fold of several leaves float32 behind, and the last one begins with it."""
    rng, dtypes = np.random.default_rng(6), [dtype_of(name) if half else np.dtype(np.float32) for half in narrow]
    rows, outs = [draw(rng, dtypes[0]) for _ in range(3)], [np.empty(512, dtypes[1]) for _ in range(2)]
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (*rows, *outs)]
    number = len(cases()) + WIDE.index((name, narrow))
    getattr(compiled, f"k{number}")(*pointers[:3], ctypes.c_float(7.0), *pointers[3:], ctypes.c_longlong(512))
    with np.errstate(all="ignore"):
        wanted = (functools.reduce(np.add, [x.astype(np.float32) for x in rows]) / np.float32(7)).astype(dtypes[1])
    for out in outs:
        assert np.array_equal(out, wanted, equal_nan=True)
    assert kernels.source("int64", "add", 2, 1, False, False, narrow) == kernels.source(
        "int64", "add", 2, 1, False, False
    )


def test_sources_compile_for_a_gpu() -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    for name in TYPES:
        text = kernels.source(name, "add", 1, 1, False, False)["preamble"] + functions(
            'extern "C" __global__ void', name
        )
        try:
            program = nvrtc.createProgram(text, "kernels.cu", [], [])
            nvrtc.compileProgram(program, ["--gpu-architecture=sm_90"])
        except (OSError, RuntimeError) as error:
            if isinstance(error, nvrtc.NVRTCError):
                raise AssertionError(nvrtc.getProgramLog(program)[:2000]) from error
            pytest.skip(f"NVRTC cannot be loaded: {error}")


def test_too_many_rows_would_not_fit() -> None:
    bytes_of_an_array = 32  # pointer, size, shape, stride
    assert 2 * kernels.MOST_ROWS * bytes_of_an_array + 64 * 8 < 4096
