"""``Tensor``, and functions of several tensors."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from mpiddp import moved
from mpiddp.device import array_namespace, download
from mpiddp.device.place import Conversion, conversion, place_of
from mpiddp.errors import ArrayError
from mpiddp.typing import Array, DTypeLike, Shape

from .arithmetic import Operand, Where
from .engine import run_backward
from .function import Function, RemovableHandle, Variable, as_array, constant, is_differentiable, mode, values_of
from .reduction import Reductions
from .shaping import Join

_T = TypeVar("_T")


class Convert(Function):
    """Conversion of ``a`` to another device or dtype."""

    def forward(self, a: Array, convert: Conversion) -> Array:
        self.back = Conversion("kept" if convert.place == "kept" else place_of(a), a.dtype)
        return convert(a)

    def backward(self, grad: Array) -> Array:
        return self.back(grad)


class ElementCount(int):
    """The number of elements. A call returns the shape or one length, as torch's ``size()`` does."""

    shape: Shape

    def __new__(cls, shape: Shape) -> ElementCount:
        count = super().__new__(cls, math.prod(shape))
        count.shape = shape
        return count

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


def _of_data(function: Callable[[Any], _T]) -> Callable[[Tensor], _T]:
    """Return the method that applies a function to the array."""
    return lambda self: function(self.data)


def _in_place(ufunc: str) -> Callable[[Tensor, Operand], Any]:
    """Return the method of an operator such as ``+=``.

    Under `no_grad`, as in an optimizer's step, it works in place. Otherwise Python makes a new tensor, but a leaf that
    requires a gradient raises an error.
    """

    def augmented(self: Tensor, other: Operand) -> Any:
        if mode.enabled and (self.grad_fn is not None or not self.requires_grad):
            return NotImplemented
        data = self._writable(other)
        getattr(array_namespace(data), ufunc)(data, values_of(other), out=data, casting="same_kind")
        return self

    return augmented


class Tensor(Reductions):
    """An array on the tape, with torch's methods.

    An array given as ``data`` is kept, not copied; Python floats become float32. ``backward`` adds to the array
    ``grad``, or makes it after ``grad = None``. If the tensor has a ``grad_slot``, ``backward`` makes ``grad`` there,
    and overwrites an older gradient that the program may still hold. The tape does not record in-place operations.
    ``x[...] = value`` raises RuntimeError if ``x`` or ``value`` requires a gradient, except under :class:`no_grad`,
    where ``+=`` works in place, too.

    Examples
    --------
    >>> from mpiddp.autograd import Tensor
    >>> x = Tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    array([2., 4., 6.], dtype=float32)
    """

    # None makes NumPy leave `array + tensor` to __radd__ of the tensor.
    __array_ufunc__ = None

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        self.data = as_array(data.data if isinstance(data, Variable) else data)
        if requires_grad:
            self.requires_grad_()

    # -- properties and values -------------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        """Lengths of the axes."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's dtype."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.data.ndim

    @property
    def size(self) -> ElementCount:
        """Number of elements. As in torch, ``size()`` is the shape and ``size(dim)`` one length."""
        return ElementCount(self.data.shape)

    @property
    def device(self) -> str:
        """The device of the array, ``"cpu"`` or ``"cuda:N"``."""
        place = place_of(self.data)
        return "cpu" if place is None else f"cuda:{place}"

    @property
    def is_leaf(self) -> bool:
        """True if no recorded operation made this tensor."""
        return self.grad_fn is None

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return self.data.item()

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers."""
        return self.data.tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return the array if it is on the host, or a copy of an array on a GPU.

        A tensor that requires a gradient needs ``force``.
        """
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return download(self.data)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        host = self.numpy()
        return np.asarray(host, dtype) if copy is None else np.array(host, dtype, copy=copy)

    @property
    def __mpiddp_array__(self) -> Array:
        if self.grad_fn is not None and self.requires_grad:
            raise ArrayError(
                f"expected an array or a leaf tensor, got a tensor of shape {self.shape} that {self.grad_fn!r} made "
                "and that requires grad: autograd would not see it change; pass tensor.detach()"
            )
        return self.data

    __len__, __index__ = _of_data(len), _of_data(operator.index)
    __bool__, __int__, __float__ = _of_data(bool), _of_data(int), _of_data(float)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __format__(self, specification: str) -> str:
        return format(self.item() if self.data.ndim == 0 else repr(self), specification)

    def __repr__(self) -> str:
        values = np.array2string(download(self.data), separator=", ", prefix="Tensor(")
        origin = f", grad_fn={self.grad_fn!r}" if self.grad_fn else ", requires_grad=True" if self.requires_grad else ""
        dtype = "" if self.dtype == np.float32 else f", dtype={self.dtype}"
        return f"{type(self).__name__}({values}{dtype}{origin})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if self.grad_fn is not None:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment."
            )
        # The copy has neither grad_slot, which is a part of a DDP bucket, nor hooks, which may hold communicators.
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.data = self.data.copy()
        twin.requires_grad = self.requires_grad
        if self.grad is not None:
            twin.grad = self.grad.copy()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"grad_slot", "post_accumulate_grad_hooks"}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    # -- in place --------------------------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Operand) -> None:
        if isinstance(index, tuple):
            index = tuple(values_of(part) for part in index)
        self._writable(value)[values_of(index)] = values_of(value)

    def _writable(self, *operands: Operand) -> Array:
        """Return the array to write to; refuse writes that the tape would not see."""
        if mode.enabled:
            if self.requires_grad and self.grad_fn is None:
                raise RuntimeError(
                    "a leaf Variable that requires grad is being used in an in-place operation: write inside of"
                    " no_grad(), or to its .data"
                )
            if self.requires_grad or any(getattr(x, "requires_grad", False) for x in operands):
                raise RuntimeError(
                    "an in-place operation on a tensor of the tape would change a value that backward needs: compute a"
                    " new tensor, or write inside of no_grad()"
                )
        return self.data

    __iadd__, __isub__ = _in_place("add"), _in_place("subtract")
    __imul__, __itruediv__ = _in_place("multiply"), _in_place("true_divide")

    # -- the tape --------------------------------------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set whether backward computes a gradient for this leaf, and return the leaf."""
        if requires_grad and not is_differentiable(self.data.dtype):
            raise RuntimeError("only Tensors of floating point and complex dtype can require gradients")
        self.requires_grad = requires_grad
        return self

    def detach(self) -> Tensor:
        """Return a tensor of the same array that is not on the tape."""
        return Tensor(self.data)

    def backward(self, gradient: Any = None, retain_graph: bool | None = None) -> None:
        """Add the gradient of this tensor to ``grad`` of every leaf behind it, the model's last layers first.

        ``gradient`` has this tensor's shape and weights its elements. A tensor of one element needs no ``gradient``.
        ``retain_graph`` keeps the graph for another backward.
        """
        if not self.requires_grad:
            raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
        if gradient is None:
            if self.data.size != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            gradient = array_namespace(self.data).ones_like(self.data)
        else:
            gradient = array_namespace(self.data).asarray(values_of(gradient), dtype=self.data.dtype)
            if gradient.shape != self.data.shape:
                raise RuntimeError(
                    f"Mismatch in shape: grad_output[0] has a shape of {gradient.shape} and output[0] has a shape of "
                    f"{self.data.shape}."
                )
        run_backward(self, gradient, bool(retain_graph))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], object]) -> RemovableHandle:
        """Call ``hook(leaf)`` in each backward, when this leaf's ``grad`` is final."""
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if self.grad_fn is not None:
            raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
        if self.post_accumulate_grad_hooks is None:
            self.post_accumulate_grad_hooks = {}
        return RemovableHandle(self.post_accumulate_grad_hooks, hook)

    # -- device and dtype --------------------------------------------------------------------------------------------

    def to(self, device: Any = None, dtype: Any = None, non_blocking: bool = False, copy: bool = False) -> Tensor:
        """Return the values on another device, with another dtype, or both; gradients flow back.

        ``device`` is ``"cpu"``, ``"cuda"``, ``"cuda:N"``, N, a dtype, or an array or tensor whose device and dtype are
        taken. ``copy`` makes a copy even if nothing changes. ``non_blocking`` is ignored: the host waits only for
        copies to itself.
        """
        convert = conversion(values_of(device), dtype)
        if convert.place == "kept" and self.data.dtype == convert.dtype:
            return self.clone() if copy else self
        if self.requires_grad and mode.enabled and (convert.dtype is None or is_differentiable(convert.dtype)):
            result = Convert.apply(self, convert)
        else:
            result = constant(convert(self.data))
        if result.data is self.data:
            return self.clone() if copy else self
        return result

    def cpu(self) -> Tensor:
        """Return the values on the host."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Tensor:
        """Return the values on a GPU, by default the current one."""
        return self.to("cuda" if device is None else device)

    def astype(self, dtype: DTypeLike) -> Tensor:
        """Return the values with another dtype."""
        return self.to(np.dtype(dtype))


Function.output_type = Tensor
moved.explain_attributes(Tensor)


def cat(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Join tensors along an axis."""
    return Join.apply(dim, *tensors)


def stack(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Join tensors of one shape along a new axis."""
    return cat([(x if isinstance(x, Tensor) else Tensor(x)).unsqueeze(dim) for x in tensors], dim)


def where(condition: Any, input: Any, other: Any) -> Tensor:
    """Return ``input`` where ``condition`` holds, else ``other``."""
    return Where.apply(condition, input, other)
