"""The gate between arrays and MPI: an array becomes bytes here, or an error that says what to do.

MPI sends whatever memory it is pointed to. Everything that could make that memory be something else than the caller
meant (a strided view, swapped bytes, Python objects, a read-only result) is refused here, before anything is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from mpiddp.device import is_device_array
from mpiddp.device.foreign import is_read_only
from mpiddp.errors import ArrayError
from mpiddp.typing import Array

from . import foreign
from .lazy import MPI

# MPI counts in a C int where the library is older than MPI-4 (Open MPI 5).
MAX_COUNT = 2**31 - 1


def _code_names() -> list[str]:
    kinds = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    floats = ["float16", "float32", "float64", "longdouble", "bfloat16"]
    return ["bool", *kinds, *floats, "complex64", "complex128", "clongdouble"]


_NAMES = _code_names()
_OTHER = 31
CODES = _OTHER + 1
"""Number of dtype codes: what a point-to-point message's tag is multiplied by."""

_codes: dict[np.dtype[Any], int] = {}


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the small integer by which the ranks know ``dtype``; types without one of their own share the last."""
    code = _codes.get(dtype)
    if code is None:
        name = {"float128": "longdouble", "complex256": "clongdouble"}.get(dtype.name, dtype.name)
        code = _codes[dtype] = _NAMES.index(name) if name in _NAMES else _OTHER
    return code


def dtype_layout(dtype: np.dtype[Any]) -> str:
    """Return what tells ``dtype`` from the others that have no code of their own; empty for one that has."""
    return str(dtype) if dtype_code(dtype) == _OTHER else ""


def code_name(code: int) -> str:
    """Return the name of the dtype that has ``code``."""
    return _NAMES[code] if code < len(_NAMES) else "another dtype"


def as_array(x: object, operation: str, *, writable: bool = True, name: str = "tensor") -> Array:
    """Return the array that ``x`` is or holds, if MPI can take it as it is.

    Parameters
    ----------
    x : array or object with ``__mpiddp_array__``
        What the caller gave; also an array of another library, which is seen through without a copy (see `foreign`).
    operation, name : str
        The operation and its parameter, for the error.
    writable : bool, default True
        Whether the operation writes to it.

    Raises
    ------
    TypeError
        If ``x`` is none of these, or holds Python objects.
    ArrayError
        If it is not C-contiguous, not aligned, not in native byte order, or read-only where it is written to; or if its
        library does not give its memory away.
    """
    if type(x) is np.ndarray and x.dtype in _codes:
        flags = x.flags
        if flags.carray or (flags.c_contiguous and flags.aligned and not writable):
            return x
    return _examine(x, operation, writable, name)


def _examine(x: object, operation: str, writable: bool, name: str) -> Array:
    """Do what `as_array` does, the long way: look through a tensor, or name what is wrong."""
    held: Array | None = getattr(x, "__mpiddp_array__", None)
    ours = held is not None or isinstance(x, np.ndarray) or is_device_array(x)
    array: Array = held if held is not None else x if ours else _adopted(x, operation, name)  # type: ignore[assignment]
    if held is not None and not writable and not array.flags.c_contiguous:
        # How a tensor lies in memory is autograd's business: a linear layer's output is a transposed view.
        array = array.copy(order="C")
    if array.dtype.hasobject:
        raise TypeError(
            f"{operation} needs numbers, got an array of Python objects as `{name}`; use the object collectives"
            " (all_gather_object, broadcast_object_list, send_object_list)"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{operation} got a masked array as `{name}`, whose mask would be lost; pass x.filled(value)")
    found = f"got {array.dtype} {array.shape}"
    if not array.flags.c_contiguous:
        cure = "numpy.ascontiguousarray(x)" if ours else "a contiguous copy of it, such as torch's x.contiguous()"
        _refuse(operation, name, f"a C-contiguous array, {found} with strides {array.strides}", cure)
    if isinstance(array, np.ndarray) and not array.flags.aligned:
        _refuse(operation, name, f"an aligned array, {found} at an odd address", "x.copy()")
    if not array.dtype.isnative:
        _refuse(
            operation,
            name,
            f"native byte order, {found} in {array.dtype.byteorder!r}",
            "x.astype(x.dtype.newbyteorder('='))",
        )
    fixed = not array.flags.writeable if isinstance(array, np.ndarray) else not ours and is_read_only(x)
    if writable and fixed:
        cure = "x.copy()" if ours else "a copy of it that may be written to"
        _refuse(operation, name, f"a writable array, {found} that is read-only", cure)
    dtype_code(array.dtype)
    return np.asarray(array) if isinstance(array, np.ndarray) else array  # subclasses such as matrix reshape otherwise


def _adopted(x: object, operation: str, name: str) -> Array:
    """Return another library's array as one of ours."""
    try:
        found = foreign.adopt(x)
    except Exception as error:  # each library has errors of its own
        raise ArrayError(
            f"{operation} cannot take this {type(x).__name__} as `{name}` without a copy: {error}"
        ) from error
    if found is None:
        plain = isinstance(x, (list, tuple, int, float, np.generic))
        hint = "pass numpy.array(x)" if plain else "or a Tensor that holds one"
        raise TypeError(
            f"Expected parameter `{name}` of {operation} to be a NumPy or CuPy array, got {type(x).__name__}; {hint}"
        )
    return found


def _refuse(operation: str, name: str, what: str, cure: str) -> NoReturn:
    raise ArrayError(f"{operation} needs {what} as `{name}`; pass {cure}")


def as_arrays(
    xs: object, operation: str, length: int, *, writable: bool = True, name: str = "tensor_list"
) -> list[Array]:
    """Return the arrays of a list that must have one for each rank.

    Raises
    ------
    TypeError
        If it is not a list (a tuple is accepted where nothing is written).
    ArrayError
        If its length is not ``length``.
    """
    if not isinstance(xs, list) and (writable or not isinstance(xs, tuple)):
        raise TypeError(f"Expected parameter `{name}` of {operation} to be a list of arrays, got {type(xs).__name__}")
    if len(xs) != length:
        raise ArrayError(
            f"{operation} needs one array in `{name}` for each of the {length} ranks of the group, got {len(xs)}"
        )
    return [as_array(x, operation, writable=writable, name=f"{name}[{index}]") for index, x in enumerate(xs)]


def expect_like(x: Array, shape: tuple[int, ...] | None, dtype: np.dtype[Any], operation: str, name: str) -> None:
    """Refuse an array whose dtype, or shape where one is given, is not the expected one."""
    if x.dtype != dtype:
        raise ArrayError(f"{operation} needs {dtype} as `{name}`, as in the other arrays of the call, got {x.dtype}")
    if shape is not None and x.shape != shape:
        raise ArrayError(f"{operation} needs shape {shape} as `{name}`, got {x.shape}")


def as_bytes(x: Array) -> Array:
    """Return the memory of a contiguous array as a flat array of bytes: no copy."""
    return x.reshape(-1).view(np.uint8)


@functools.cache
def _is_named(dtype: np.dtype[Any]) -> bool:
    return dtype.isbuiltin != 2 and dtype.kind in "biufc" and dtype.char not in "egG"


def movable(x: Array) -> Array:
    """Return ``x``, or its bytes where MPI has no name for its dtype; for operations that only move data."""
    return x if _is_named(x.dtype) else as_bytes(x)


def countable(x: Array) -> bool:
    """Tell whether MPI can count the elements of ``x``."""
    return x.size <= MAX_COUNT


_types: dict[np.dtype[Any], MPI.Datatype] = {}


def counted(x: Array) -> list[Any]:
    """Return ``x``, of a dtype that MPI knows, as a message of elements: MPI need not find out its type and length."""
    found = _types.get(x.dtype)
    if found is None:
        found = _types[x.dtype] = MPI.Datatype.fromcode(x.dtype.char)
    return [x, x.size, found]


def chunks(x: Array) -> Sequence[Array]:
    """Return flat pieces of ``x`` that MPI can count."""
    if x.size <= MAX_COUNT:
        return (x,)
    flat = x.reshape(-1)
    return [flat[start : start + MAX_COUNT] for start in range(0, x.size, MAX_COUNT)]


_longs: dict[tuple[int, int], MPI.Datatype] = {}
_MOST_LONGS = 64


def _long(size_bytes: int, max_count: int) -> MPI.Datatype:
    """Return one datatype of more bytes than MPI can count; those that were used last are kept."""
    key = size_bytes, max_count
    found = _longs.pop(key, None)
    if found is None:
        found = _make_long(size_bytes, max_count)
    _longs[key] = found
    if len(_longs) > _MOST_LONGS:
        # Messages of it that are on their way keep what MPI needs of it.
        _longs.pop(next(iter(_longs))).Free()
    return found


def _make_long(size_bytes: int, max_count: int) -> MPI.Datatype:
    """Make such a datatype: as many bytes as MPI can count, several times, and the rest."""
    times, rest_bytes = divmod(size_bytes, max_count)
    largest, rest = MPI.BYTE.Create_contiguous(max_count), MPI.BYTE.Create_contiguous(rest_bytes)
    body = largest.Create_contiguous(times)
    whole = MPI.Datatype.Create_struct([1, 1], [0, times * max_count], [body, rest]).Commit()
    for part in (body, rest, largest):
        part.Free()
    return whole


def as_message(x: Array, size_bytes: int) -> list[Any]:
    """Return the first bytes of ``x`` as one message, however long: memory, count, MPI's datatype."""
    if size_bytes <= MAX_COUNT:
        return [movable(x), size_bytes, MPI.BYTE]
    return [as_bytes(x), 1, _long(size_bytes, MAX_COUNT)]


def size_of(status: MPI.Status) -> int:
    """Return the length in bytes of the message that ``status`` tells of, however long it is."""
    count = status.Get_count(MPI.BYTE)
    return count if count != MPI.UNDEFINED else status.Get_elements(MPI.BYTE)
