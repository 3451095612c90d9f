"""Checks of a call's arrays before MPI gets them, and the form in which MPI gets them.

MPI would send any memory. These checks refuse arrays that the caller cannot have meant: strided and byte-swapped
arrays, Python objects, read-only outputs. The error says what to do instead. Arrays of other libraries pass without a
copy, and without importing the library (DLPack 1.0, CUDA array interface 3, NumPy's array interface 3, PEP 688).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy import may_share_memory, ndarray

from mpiddp.device import cuda_fault, dlpack, is_device_array, is_masked
from mpiddp.device.half import bfloat16
from mpiddp.errors import ArrayError
from mpiddp.typing import Array

from .lazy import MPI

# The largest count that MPI takes before version 4, where a count is a C int.
MAX_COUNT = 2**31 - 1


_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "longdouble", "bfloat16", "complex64", "complex128", "clongdouble"),
)
_OTHER = 31
CODES = _OTHER + 1

_codes: dict[np.dtype[Any], int] = {}


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return a dtype's number, the same on all ranks. Dtypes that are not in `_NAMES` share the last number."""
    code = _codes.get(dtype)
    if code is None:
        name = {"float128": "longdouble", "complex256": "clongdouble"}.get(dtype.name, dtype.name)
        code = _codes[dtype] = _NAMES.index(name) if name in _NAMES else _OTHER
    return code


def dtype_layout(dtype: np.dtype[Any]) -> str:
    """Return a text that tells apart the dtypes which share a `dtype_code`; "" for a dtype with a code of its own."""
    return str(dtype) if dtype_code(dtype) == _OTHER else ""


def code_name(code: int) -> str:
    return _NAMES[code] if code < len(_NAMES) else "another dtype"


def as_array(x: object, operation: str, *, writable: bool = True, name: str = "tensor") -> Array:
    """Return the array that ``x`` is or holds. Errors name the parameter, ``name``.

    TypeError if it is no array, is masked, has Python objects, or is on a GPU that cannot be used. ArrayError unless it
    is C-contiguous, aligned, in native byte order and, if ``writable``, not read-only; also if its library refuses
    access to its memory. A Tensor that is only read may have another layout; then the result is a copy.
    """
    if type(x) is ndarray and x.dtype in _codes:
        flags = x.flags
        if flags.carray or (flags.c_contiguous and flags.aligned and not writable):
            return x
    return _examine(x, operation, writable, name)


def _examine(x: object, operation: str, writable: bool, name: str) -> Array:
    held: Array | None = getattr(x, "__mpiddp_array__", None)
    ours = held is not None or isinstance(x, ndarray) or is_device_array(x)
    array: Array = held if held is not None else x if ours else _adopted(x, operation, writable, name)  # type: ignore[assignment]
    if not isinstance(array, ndarray) and (fault := cuda_fault()) is not None:
        raise TypeError(f"{operation} cannot take an array on a GPU as `{name}`: {fault}")
    if held is not None and not writable and not array.flags.c_contiguous:
        # The program has not chosen this layout: autograd's output of a linear layer is a transposed view.
        array = array.copy(order="C")
    if array.dtype.hasobject:
        raise TypeError(
            f"{operation} needs numbers, got an array of Python objects as `{name}`; use the object collectives"
            " (all_gather_object, broadcast_object_list, send_object_list)"
        )
    if is_masked(array):
        raise TypeError(f"{operation} got a masked array as `{name}`, whose mask would be lost; pass x.filled(value)")
    got, need = f"got {array.dtype} {array.shape}", ""
    if not array.flags.c_contiguous:
        need = f"a C-contiguous array, {got} with strides {array.strides}"
        copy = "numpy.ascontiguousarray(x)" if ours else "x.contiguous()"
    elif isinstance(array, ndarray) and not array.flags.aligned:
        need, copy = f"an aligned array, {got} at an odd address", "x.copy()"
    elif not array.dtype.isnative:
        need, copy = f"native byte order, {got} in {array.dtype.byteorder!r}", "x.astype(x.dtype.newbyteorder('='))"
    if need:
        cure = f"make y = {copy}, pass y, and copy the result back: x[...] = y" if writable else f"pass {copy}"
        raise ArrayError(f"{operation} needs {need} as `{name}`; {cure}")
    fixed = not array.flags.writeable if isinstance(array, ndarray) else not ours and dlpack.is_read_only(x)
    if writable and fixed:
        # The advice is a copy by NumPy or CuPy, because copies by other libraries may be read-only, too, as JAX's are.
        copy = "x.copy()" if ours else f"{'numpy' if isinstance(array, ndarray) else 'cupy'}.array(x)"
        also = ", or call tree_all_reduce, which returns new arrays" if operation == "all_reduce" else ""
        raise ArrayError(
            f"{operation} needs a writable array, {got} that is read-only as `{name}`; pass y = {copy} and read the"
            f" result from y{also}"
        )
    dtype_code(array.dtype)
    # `asarray`, because subclasses such as `numpy.matrix` have a `reshape` that keeps two dimensions.
    return np.asarray(array) if isinstance(array, ndarray) else array


def _adopted(x: object, operation: str, writable: bool, name: str) -> Array:
    try:
        array = _over_the_memory_of(x)
    except Exception as error:  # every library raises errors of its own classes
        raise ArrayError(
            f"{operation} cannot take this {type(x).__name__} as `{name}` without a copy: {error}"
        ) from error
    if array is None:
        plain = isinstance(x, (list, tuple, int, float, np.generic))
        hint = "or a Tensor that holds one"
        if plain:
            hint = "make y = numpy.array(x), pass y and read the result from y" if writable else "pass numpy.array(x)"
        raise TypeError(
            f"Expected parameter `{name}` of {operation} to be a NumPy or CuPy array, got {type(x).__name__}; {hint}"
        )
    return array


def _over_the_memory_of(x: Any) -> Array | None:
    """Return an array over the memory of ``x``; None if it shows no memory, and for NumPy's scalars and ``bytes``.

    Errors of the library of ``x`` are passed on, such as torch's for a tensor that requires a gradient.
    """
    if isinstance(x, np.generic | bytes):
        return None
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        kind, _ = x.__dlpack_device__()
        return _from_dlpack(x) if kind in _HOST else dlpack.adopt(x)
    if hasattr(x, "__cuda_array_interface__"):
        return dlpack.adopt(x)
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        return None


_HOST = (1, 3, 11)  # kDLCPU, kDLCUDAHost and kDLROCMHost, the devices that NumPy reads


def _from_dlpack(x: Any) -> Array:
    try:
        return np.from_dlpack(x)
    except (RuntimeError, BufferError):  # such as "Unsupported dtype in DLTensor": NumPy's DLPack has no bfloat16
        name = str(getattr(x, "dtype", ""))
        if not (name.endswith("bfloat16") and hasattr(x, "view")) or getattr(x, "requires_grad", False):
            raise
        bits = x.view(sys.modules["torch"].uint16 if name.startswith("torch.") else "uint16")
    return np.from_dlpack(bits).view(bfloat16())


def as_arrays(
    xs: object, operation: str, length: int, *, writable: bool = True, name: str = "tensor_list"
) -> tuple[list[Array], object]:
    """Return the arrays of a list, one for each of ``length`` ranks, and a key of their dtypes and shapes.

    Errors are those of `as_array`; also ArrayError for another length, and for ``writable`` arrays that share memory.
    Anything but a list is a TypeError; arrays that are only read may be in a tuple.
    """
    if not isinstance(xs, list) and (writable or not isinstance(xs, tuple)):
        raise TypeError(f"Expected parameter `{name}` of {operation} to be a list of arrays, got {type(xs).__name__}")
    if len(xs) != length:
        raise ArrayError(
            f"{operation} needs one array in `{name}` for each of the {length} ranks of the group, got {len(xs)}"
        )
    first = xs[0]
    if type(first) is ndarray and first.dtype in _codes:
        dtype, shape = first.dtype, first.shape
        for x in xs:  # in the usual case all arrays have one dtype and shape, and need no `as_array`
            if type(x) is not ndarray or x.dtype is not dtype or x.shape != shape or not x.flags.carray:
                break
        else:
            if writable and not _are_apart(xs):
                _expect_apart(xs, operation)
            return [*xs], (dtype, shape)
    found = [as_array(x, operation, writable=writable, name=f"{name}[{i}]") for i, x in enumerate(xs)]
    if writable:
        _expect_apart(found, operation)
    return found, tuple(map(like, found))


like = attrgetter("dtype", "shape", "__class__")
"""The function that returns the dtype, shape and class of an array, which are parts of the keys of plans."""


def _are_apart(xs: Sequence[Array]) -> bool:
    """Return True if a quick look shows that arrays of one dtype and shape share no memory.

    The look shows it for any two arrays. It shows it for more arrays if each owns its memory, or if they lie in memory
    in the order of the list, as the parts of one array do.
    """
    if len(xs) == 2:  # this call takes a third of the time of the code below
        return not may_share_memory(xs[0], xs[1])
    for x in xs:
        if x.base is not None:
            break
    else:
        return len({*map(id, xs)}) == len(xs)
    end, size_bytes = 0, x.nbytes
    for start in map(MPI.Get_address if _is_named(x.dtype) else _address, xs):
        if start < end:
            return False
        end = start + size_bytes
    return True


def _expect_apart(outputs: Sequence[Array], operation: str) -> None:
    """Raise ArrayError for outputs that share memory, as in ``[x] * size``, where one result would replace another."""
    end = last = 0
    for start, size_bytes, index in sorted((_address(x), x.nbytes, index) for index, x in enumerate(outputs) if x.size):
        if start < end:
            raise ArrayError(
                f"{operation} needs outputs with memory of their own, got the arrays {last} and {index} of the list"
                " over the same memory, where one result would replace the other: make one for each rank, such as"
                " [numpy.empty_like(x) for _ in range(size)]"
            )
        end, last = start + size_bytes, index


def _address(x: Array) -> int:
    # mpi4py finds an array's address in a fifth of the time that NumPy takes.
    address: int = MPI.Get_address(movable(x)) if isinstance(x, ndarray) else x.data.ptr
    return address


def spans_of(args: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield the first address of each array, also of arrays in lists, and the address behind its last byte."""
    for each in args:
        if isinstance(each, ndarray) or is_device_array(each):
            start = _address(each)
            yield start, start + each.nbytes
        elif isinstance(each, (list, tuple)):
            yield from spans_of(each)


def expect_like(x: Array, shape: tuple[int, ...] | None, dtype: np.dtype[Any], operation: str, name: str) -> None:
    """Raise ArrayError unless the array has this dtype and, if one is given, this shape."""
    if x.dtype != dtype:
        raise ArrayError(f"{operation} needs {dtype} as `{name}`, as in the other arrays of the call, got {x.dtype}")
    if shape is not None and x.shape != shape:
        raise ArrayError(f"{operation} needs shape {shape} as `{name}`, got {x.shape}")


def as_bytes(x: Array) -> Array:
    return x.reshape(-1).view(np.uint8)


@functools.cache
def _is_named(dtype: np.dtype[Any]) -> bool:
    return dtype.isbuiltin != 2 and dtype.kind in "biufc" and dtype.char not in "egG"


def movable(x: Array) -> Array:
    """Return the array, or its bytes if its dtype travels as bytes: half types, long doubles, and all but numbers."""
    return x if _is_named(x.dtype) else as_bytes(x)


def plain(x: Array) -> bool:
    """Return True if the array itself, without a view of it, can be one message of bytes."""
    return isinstance(x, ndarray) and _is_named(x.dtype) and x.nbytes <= MAX_COUNT


def countable(x: Array) -> bool:
    return x.size <= MAX_COUNT


@functools.cache
def _type(dtype: np.dtype[Any]) -> MPI.Datatype:
    return MPI.Datatype.fromcode(dtype.char)


def counted(x: Array) -> list[Any]:
    """Return the array with its count and datatype, which mpi4py would have to look up."""
    return [x, x.size, _type(x.dtype)]


def chunks(x: Array) -> Sequence[Array]:
    """Return the array, or flat pieces of it, each short enough for MPI's count."""
    if countable(x):
        return (x,)
    flat = x.reshape(-1)
    return [flat[start : start + MAX_COUNT] for start in range(0, x.size, MAX_COUNT)]


@functools.cache
def _long(size_bytes: int) -> MPI.Datatype:
    """Return a datatype of ``size_bytes``, for messages that are too long for MPI's count."""
    times, rest_bytes = divmod(size_bytes, MAX_COUNT)
    largest, rest = MPI.BYTE.Create_contiguous(MAX_COUNT), MPI.BYTE.Create_contiguous(rest_bytes)
    body = largest.Create_contiguous(times)
    datatype = MPI.Datatype.Create_struct([1, 1], [0, times * MAX_COUNT], [body, rest]).Commit()
    for part in (body, rest, largest):
        part.Free()
    return datatype


def as_message(x: Array, size_bytes: int) -> list[Any]:
    """Return the first ``size_bytes`` of ``x`` as one message, which may be longer than MPI's count."""
    if size_bytes <= MAX_COUNT:
        return [x if _is_named(x.dtype) else as_bytes(x), size_bytes, MPI.BYTE]
    return [as_bytes(x), 1, _long(size_bytes)]


def size_of(status: MPI.Status) -> int:
    count = status.Get_count(MPI.BYTE)
    return count if count != MPI.UNDEFINED else status.Get_elements(MPI.BYTE)
