"""The array of the fake device: a NumPy array that is computed late, and is none.

Views are made at once. Whatever computes is queued on the current stream and writes to memory that is there already;
its shape and dtype are found by doing it on zeros first. NumPy's functions come here by its protocols, as in CuPy, and
an array that would turn into a NumPy array unseen raises.
"""

from __future__ import annotations

import ctypes
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import _late
from ._memory import MemoryPointer, Pooled, UnownedMemory, is_pinned


class Flags(NamedTuple):
    """How an array lies in memory; CuPy knows none that is read-only."""

    c_contiguous: bool
    f_contiguous: bool


class ndarray:  # noqa: N801 - CuPy's name
    """An array on the device (``cupy.ndarray``)."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if memptr is None:
            memptr = MemoryPointer(Pooled(nbytes), 0)
        buffer = (ctypes.c_char * max(nbytes, 1)).from_address(memptr.ptr)
        self._host = np.ndarray(shape, dtype, buffer, strides=strides, order=order)  # type: ignore[call-overload]
        self.data = memptr
        self.base: ndarray | None = None

    # -- what it is ------------------------------------------------------------------------------------------------

    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    dtype = property(lambda self: self._host.dtype)
    size = property(lambda self: self._host.size)
    ndim = property(lambda self: self._host.ndim)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    flags = property(lambda self: Flags(self._host.flags.c_contiguous, self._host.flags.f_contiguous))
    T = property(lambda self: self._view(self._host.T))
    real = property(lambda self: call(np.real, self))
    imag = property(lambda self: call(np.imag, self))

    @property
    def device(self) -> Any:
        """The device."""
        from .cuda import Device

        return Device(self.data.device_id)

    def _view(self, host: np.ndarray) -> ndarray:
        made = object.__new__(type(self))
        offset = host.__array_interface__["data"][0] - self.data.mem.ptr if host.size else 0
        made._host, made.data = host, MemoryPointer(self.data.mem, offset)
        made.base = self if self.base is None else self.base
        return made

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        contiguous = self._host.flags.c_contiguous
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.data.ptr if self.size else 0, False),
            "strides": None if contiguous else self.strides,
            "version": 3,
            "stream": _late.get_current_stream().ptr or 1,
        }

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array"
            " explicitly."
        )

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return call(function, *args, **kwargs)

    # -- to the host and back --------------------------------------------------------------------------------------

    def get(self) -> Any:
        """Copy to the host, and wait."""
        _late.get_current_stream(self.data.device_id).synchronize()
        return self._host.copy()

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """Copy from the host, whose array may change after the call, unless it is pinned: then no copy is made here."""
        host, source = self._host, np.asarray(arr)
        if not is_pinned(source.__array_interface__["data"][0], source.nbytes):
            source = source.copy()
        (stream or _late.get_current_stream()).put("run", lambda: np.copyto(host, source))

    def item(self, *args: Any) -> Any:
        """Return an element as a number."""
        return self.get().item(*args)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __len__(self) -> int:
        return len(self._host)

    def __repr__(self) -> str:
        return repr(self.get())

    def __iter__(self) -> Iterator[ndarray]:
        return (self[index] for index in range(len(self)))

    # -- views -----------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        """Return a view, or a copy where there is none."""
        return call(np.reshape, self, shape[0] if len(shape) == 1 else shape, order=order)

    def view(self, dtype: Any = None) -> ndarray:
        """Return a view of another dtype."""
        return self._view(self._host.view() if dtype is None else self._host.view(np.dtype(dtype)))

    def transpose(self, *axes: Any) -> ndarray:
        """Return a view with its axes permuted."""
        return self._view(self._host.transpose(*axes))

    def __getitem__(self, key: Any) -> ndarray:
        if _is_view_key(key):
            host = self._host[key]
            return self._view(host if isinstance(host, np.ndarray) else _element(self._host, key))
        return call(operator.getitem, self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError(f"Unsupported type {type(value)}")
        _check(value)
        check_current(self, key, value)
        host, key, value = self._host, _host(key), _host(value)

        def run() -> None:
            host[key] = value

        _zeros_like(host)[_zeros(key)] = _zeros(value)  # shapes that do not fit
        _late.get_current_stream().put("run", run)

    def astype(self, dtype: Any, order: str = "K", casting: str = "unsafe", copy: bool = True) -> ndarray:
        """Return a copy of another dtype."""
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return call(lambda host: host.astype(dtype, order=order), self)

    def copy(self, order: str = "C") -> ndarray:
        """Return a copy, on the current device."""
        if self.data.device_id == _late.get_device():
            return call(lambda host: host.copy(order), self)
        assert self.flags.c_contiguous, "CuPy copies it with work of its own on the other device"
        made = ndarray(self.shape, self.dtype)
        source, target = self._host, made._host
        _late.get_current_stream().put("run", lambda: np.copyto(target, source))
        return made

    def fill(self, value: Any) -> None:
        """Set all elements."""
        self[...] = value


def _is_view_key(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, np.integer, slice)) for part in parts)


def _element(host: np.ndarray, key: Any) -> np.ndarray:
    return host[(*(key if isinstance(key, tuple) else (key,)), ...)]


def _walk(given: Any, change: Callable[[Any], Any]) -> Any:
    """Change the arrays in what a function is given."""
    if isinstance(given, ndarray):
        return change(given)
    if isinstance(given, (list, tuple)):
        parts = [_walk(each, change) for each in given]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return given


def _host(given: Any) -> Any:
    return _walk(given, lambda x: x._host)


def _zeros_like(host: np.ndarray) -> np.ndarray:
    return np.zeros(host.shape, host.dtype)


def _zeros(given: Any) -> Any:
    if isinstance(given, np.ndarray):
        return _zeros_like(given)
    if isinstance(given, (list, tuple)) and not hasattr(given, "_fields"):
        return type(given)(_zeros(each) for each in given)
    return given


def _check(given: Any) -> None:
    """Refuse arrays of NumPy beside those of the device."""
    for each in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(each, np.ndarray) and each.ndim:
            raise TypeError(f"Unsupported type {type(each)}")


def _check_product(*given: ndarray) -> None:
    """Refuse a product of stacks of bfloat16 matrices, for which CuPy 14 has no kernel."""
    if max(x.ndim for x in given) > 2 and any(x.dtype.name == "bfloat16" for x in given):
        raise TypeError("data type 'E' not understood")


def check_current(*given: Any) -> None:
    """Refuse arrays of a device that is not current: a device without access to its peers cannot read them."""
    current, found = _late.get_device(), list[int]()
    _walk(given, lambda x: found.append(x.data.device_id))
    for device in found:
        if device != current:
            raise ValueError(
                f"Array device must be same as the current device: array device = {device} while current = {current}"
            )


def _has_mask(given: Any) -> bool:
    found = []
    _walk(given, lambda x: found.append(x.dtype == bool))
    return any(found)


# They write to their first array and return nothing.
_WRITING = {np.copyto, np.put_along_axis, np.put, np.fill_diagonal, np.add.at}
_LIKE = {np.empty_like, np.zeros_like, np.ones_like, np.full_like}
# Their results' shapes depend on numbers: CuPy waits for them too.
_WAITING = {np.nonzero, np.flatnonzero, np.argwhere, np.unique, np.bincount, np.repeat}


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Queue a function of NumPy on the current stream, and return its results to be; views at once."""
    for each in (*args, *kwargs.values()):
        _check(each)
    if function is np.matmul:
        _check_product(*args)
    if function in _LIKE and not isinstance(args[0], ndarray):
        raise AttributeError(f"{type(args[0]).__name__!r} object has no attribute 'dtype'")
    out = kwargs.pop("out", None)
    if isinstance(out, tuple):
        (out,) = out
    hosts, options = _host(args), {name: _host(value) for name, value in kwargs.items()}
    view = _as_view(function, args, hosts, options) if out is None else None
    if view is not None:
        return view
    check_current(args, tuple(kwargs.values()), out)
    _late._runtime().expect_no_error()
    stream = _late.get_current_stream()
    masked = function is operator.getitem and _has_mask(args[1:])
    if function in _WAITING or masked:
        stream.synchronize()
        return _walk_numpy(function(*hosts, **options), array)
    if function in _WRITING:
        stream.put("run", lambda: function(*hosts, **options))
        return None
    target = None if out is None else out._host
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            more = {} if target is None else {"out": _zeros_like(target)}
            like = function(*_zeros(hosts), **{name: _zeros(value) for name, value in options.items()}, **more)
    except (ArithmeticError, ValueError, np.linalg.LinAlgError):  # zeros will not do; or it is wrong
        stream.synchronize()
        like = function(*hosts, **options, **({} if target is None else {"out": target.copy()}))
    if isinstance(like, (bool, str, np.dtype, type)) or like is None:
        return like
    made: list[ndarray] = []
    result = out if out is not None else _walk_numpy(like, lambda host: made.append(_new(host)) or made[-1])
    targets = [target] if target is not None else [each._host for each in made]

    def run() -> None:
        with np.errstate(all="ignore"):
            values = function(*hosts, **options)
        for each, value in zip(targets, values if isinstance(values, (list, tuple)) else [values], strict=True):
            np.copyto(each, value, casting="unsafe")

    stream.put("run", run)
    return result


def _as_view(function: Callable[..., Any], args: Any, hosts: Any, options: Any) -> Any:
    """Return a function's result if it is a view of its first array."""
    if function not in _VIEWING or not args or not isinstance(args[0], ndarray):
        return None
    found = function(*hosts, **options)
    parts = found if isinstance(found, (list, tuple)) else [found]
    if not all(np.may_share_memory(part, hosts[0]) or part.size == 0 for part in parts):
        return None
    views = [args[0]._view(part) for part in parts]
    return views if isinstance(found, (list, tuple)) else views[0]


_VIEWING = {
    *(np.reshape, np.transpose, np.swapaxes, np.moveaxis, np.expand_dims, np.squeeze, np.broadcast_to, np.ravel),
    *(np.atleast_1d, np.atleast_2d, np.split, np.array_split, np.diagonal, np.flip, np.real, np.ascontiguousarray),
    *(np.lib.stride_tricks.as_strided, np.lib.stride_tricks.sliding_window_view, np.asarray, np.rollaxis),
}


def _new(host: Any) -> ndarray:
    host = np.asarray(host)
    return ndarray(host.shape, host.dtype)


def _walk_numpy(given: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(given, (np.ndarray, np.generic, int, float, complex)):
        return change(given)
    if isinstance(given, (list, tuple)):
        return type(given)(_walk_numpy(each, change) for each in given)
    return given


def array(obj: Any, dtype: Any = None, copy: bool = True, order: str = "K", ndmin: int = 0) -> ndarray:
    """Return an array on the device (``cupy.array``)."""
    if isinstance(obj, ndarray):
        if obj.data.device_id != _late.get_device():
            obj, copy = obj.copy(), False
        return obj.astype(dtype or obj.dtype, copy=bool(copy))
    if isinstance(obj, (list, tuple)) and any(isinstance(each, ndarray) for each in obj):
        return call(np.stack, list(obj)).astype(dtype or obj[0].dtype, copy=False)
    if hasattr(obj, "__cuda_array_interface__"):
        found = obj.__cuda_array_interface__
        pointer, _ = found["data"]
        kind, count = np.dtype(found["typestr"]), int(np.prod(found["shape"], dtype=np.int64))
        memory = UnownedMemory(pointer, count * kind.itemsize, obj) if count else Pooled(0)
        return ndarray(found["shape"], kind, MemoryPointer(memory, 0), found.get("strides"))
    host = np.asarray(obj, dtype)
    host = host.reshape((1,) * (ndmin - host.ndim) + host.shape)
    made = ndarray(host.shape, host.dtype)
    made.set(host)
    return made


def _method(name: str) -> Callable[..., Any]:
    def method(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        return call(getattr(np, name), self, *args, **kwargs)

    return method


_METHODS = "sum mean max min argmax argmin all any prod var std cumsum dot take clip squeeze swapaxes ravel nonzero"
for _name in (*_METHODS.split(), "repeat", "round", "conj"):
    setattr(ndarray, _name, _method(_name))
ndarray.flatten = lambda self: self.ravel().copy()  # type: ignore[attr-defined]

_OPERATORS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "pow": np.power}
_OPERATORS |= {"floordiv": np.floor_divide, "mod": np.remainder, "matmul": np.matmul, "xor": np.bitwise_xor}
_OPERATORS |= {"and": np.bitwise_and, "or": np.bitwise_or, "lshift": np.left_shift, "rshift": np.right_shift}


def _operator(ufunc: np.ufunc) -> tuple[Callable[..., Any], ...]:
    def forward(self: ndarray, other: Any) -> Any:
        return NotImplemented if hasattr(other, "__mpiddp_array__") else call(ufunc, self, other)

    def backward(self: ndarray, other: Any) -> Any:
        return call(ufunc, other, self)

    def in_place(self: ndarray, other: Any) -> Any:
        return call(ufunc, self, other, out=self)

    return forward, backward, in_place


for _name, _ufunc in _OPERATORS.items():
    for _prefix, _function in zip(("", "r", "i"), _operator(_ufunc), strict=True):
        setattr(ndarray, f"__{_prefix}{_name}__", _function)
_COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
_COMPARISONS |= {"gt": np.greater, "ge": np.greater_equal}
for _name, _ufunc in _COMPARISONS.items():
    setattr(ndarray, f"__{_name}__", _operator(_ufunc)[0])
for _name, _ufunc in {"neg": np.negative, "abs": np.absolute, "invert": np.invert, "pos": np.positive}.items():
    setattr(ndarray, f"__{_name}__", lambda self, _ufunc=_ufunc: call(_ufunc, self))
