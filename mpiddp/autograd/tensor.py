"""The tensor: an array on the tape, its gradient, and its operations.

Methods have torch's names and argument names; ``@`` and broadcasting are NumPy's. Comparisons and indices have no
gradient: their result is a tensor that the tape does not know.
"""
# mypy: disable-error-code="no-any-return"
# (Function.apply is typed Any: the nodes of the tape are below the tensor and cannot name its type.)

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from mpiddp.device import array_namespace, download
from mpiddp.errors import ArrayError
from mpiddp.typing import Array, DTypeLike, Shape

from . import arithmetic, reduction, shaping
from .arithmetic import MatMul
from .engine import run_backward
from .function import Function, RemovableHandle, Variable, as_array, is_differentiable
from .reduction import Dim

Operand = Any
"""A tensor, an array or a number."""


class Tensor(Variable):
    """An array on the tape.

    Parameters
    ----------
    data : array_like
        Kept as it is if an array, NumPy's or CuPy's, of any dtype and layout: nothing is copied. Python floats become
        float32.
    requires_grad : bool, default False
        Whether gradients flow to this tensor.

    Attributes
    ----------
    data : array
        The values; assignable.
    grad : array or None
        The gradient, an array, not a tensor.
    grad_slot : array or None
        Where the gradient is born, if not None: the first accumulation of a backward in which ``grad`` is None writes
        into it and makes it ``grad``. Whoever sets a slot owns it; the next backward overwrites what an older
        reference to ``grad`` still sees.

    Notes
    -----
    Gradients accumulate as torch's: ``backward`` adds to ``grad``; ``grad = None`` starts anew. A tensor that requires
    a gradient does not turn into a NumPy array by itself: say ``detach()``.

    References
    ----------
    torch.Tensor.

    Examples
    --------
    >>> from mpiddp.autograd import Tensor
    >>> x = Tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    array([2., 4., 6.], dtype=float32)
    """

    # NumPy hands `array + tensor` to __radd__.
    __array_ufunc__ = None
    # Python takes it away from a class that defines __eq__.
    __hash__ = object.__hash__

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        self.data = as_array(data.data if isinstance(data, Variable) else data)
        if requires_grad:
            self.requires_grad_()

    # -- what it is ------------------------------------------------------------------------------------------------

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
    def size(self) -> int:
        """Number of elements, as NumPy's; torch calls it ``numel()``."""
        return self.data.size

    def numel(self) -> int:
        """Return the number of elements."""
        return self.data.size

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded operation made this tensor."""
        return self.grad_fn is None

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return self.data.item()

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers."""
        return self.data.tolist()

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values as a NumPy array: the very array of a tensor on the host, a copy of one on a GPU."""
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return download(self.data)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    @property
    def __mpiddp_array__(self) -> Array:
        """The array to communicate, in place."""
        if self.grad_fn is not None and self.requires_grad:
            raise ArrayError(
                f"expected an array or a leaf tensor, got a tensor of shape {self.shape} that {self.grad_fn!r} made "
                "and that requires grad: autograd would not see it change; pass tensor.detach()"
            )
        return self.data

    def __len__(self) -> int:
        if self.data.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return len(self.data)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.data)

    def __int__(self) -> int:
        return int(self.data)

    def __float__(self) -> float:
        return float(self.data)

    def __index__(self) -> int:
        return self.data.__index__()

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
        # A copy has arrays of its own: neither the slot, which belongs to a bucket, nor the hooks go with it.
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.data = self.data.copy()
        twin.requires_grad = self.requires_grad
        if self.grad is not None:
            twin.grad = self.grad.copy()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # What a pickle holds: as above. Hooks may hold anything, communicators too.
        left_out = {"grad_slot", "grad_hooks", "post_accumulate_grad_hooks"}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def __add__(self, other: Operand) -> Tensor:
        return arithmetic.Add.apply(self, other)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Tensor:
        return arithmetic.Subtract.apply(self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return arithmetic.Subtract.apply(other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return arithmetic.Multiply.apply(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Tensor:
        return arithmetic.Divide.apply(self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return arithmetic.Divide.apply(other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return arithmetic.Power.apply(self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return arithmetic.Power.apply(other, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return MatMul.apply(self, other)

    def __rmatmul__(self, other: Operand) -> Tensor:
        return MatMul.apply(other, self)

    def __neg__(self) -> Tensor:
        return arithmetic.Negative.apply(self)

    def __abs__(self) -> Tensor:
        return arithmetic.Absolute.apply(self)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return _constant(self.data == _values(other))

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return _constant(self.data != _values(other))

    def __lt__(self, other: Operand) -> Tensor:
        return _constant(self.data < _values(other))

    def __le__(self, other: Operand) -> Tensor:
        return _constant(self.data <= _values(other))

    def __gt__(self, other: Operand) -> Tensor:
        return _constant(self.data > _values(other))

    def __ge__(self, other: Operand) -> Tensor:
        return _constant(self.data >= _values(other))

    def eq(self, other: Operand) -> Tensor:
        """Return where the values are equal, as booleans."""
        return self == other

    def pow(self, exponent: Operand) -> Tensor:
        """Return ``self ** exponent``."""
        return arithmetic.Power.apply(self, exponent)

    def matmul(self, other: Operand) -> Tensor:
        """Return ``self @ other``."""
        return MatMul.apply(self, other)

    def abs(self) -> Tensor:
        """Return the absolute values."""
        return arithmetic.Absolute.apply(self)

    def exp(self) -> Tensor:
        """Return the exponentials."""
        return arithmetic.Exponential.apply(self)

    def log(self) -> Tensor:
        """Return the natural logarithms."""
        return arithmetic.Logarithm.apply(self)

    def sqrt(self) -> Tensor:
        """Return the square roots."""
        return arithmetic.SquareRoot.apply(self)

    def sin(self) -> Tensor:
        """Return the sines."""
        return arithmetic.Sine.apply(self)

    def cos(self) -> Tensor:
        """Return the cosines."""
        return arithmetic.Cosine.apply(self)

    def tanh(self) -> Tensor:
        """Return the hyperbolic tangents."""
        return arithmetic.Tanh.apply(self)

    def sigmoid(self) -> Tensor:
        """Return the logistic function of the values."""
        return arithmetic.Sigmoid.apply(self)

    def clamp(self, min: float | None = None, max: float | None = None) -> Tensor:
        """Return the values limited to [min, max]."""
        return arithmetic.Clamp.apply(self, min, max)

    def to(self, dtype: DTypeLike) -> Tensor:
        """Return the values with another dtype; gradients come back with the first one's."""
        if self.data.dtype == dtype:
            return self
        return arithmetic.Cast.apply(self, dtype)

    def astype(self, dtype: DTypeLike) -> Tensor:
        """Return the values with another dtype: NumPy's word for :meth:`to`."""
        return self.to(dtype)

    def float(self) -> Tensor:
        """Return the values as float32."""
        return self.to("float32")

    def clone(self) -> Tensor:
        """Return a copy through which gradients flow."""
        return shaping.Copy.apply(self)

    # -- reductions ------------------------------------------------------------------------------------------------

    def sum(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Return the sum over axes, all of them by default."""
        return reduction.Sum.apply(self, dim, keepdim)

    def mean(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Return the mean over axes, all of them by default."""
        return reduction.Mean.apply(self, dim, keepdim)

    def var(self, dim: Dim = None, correction: int = 1, keepdim: bool = False) -> Tensor:
        """Return the variance over axes, divided by the number of elements less ``correction``."""
        squares = (self - self.mean(dim, keepdim=True)) ** 2
        count = reduction.reduced(self.data.shape, dim)
        mean = squares.mean(dim, keepdim)
        # A float of Python would make bfloat16 float32.
        return mean * mean.data.dtype.type(count / (count - correction) if count > correction else math.inf)

    def amax(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Return the largest values over axes; equal ones share the gradient."""
        return reduction.Extreme.apply(self, dim, keepdim, 1)

    def amin(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Return the smallest values over axes; equal ones share the gradient."""
        return reduction.Extreme.apply(self, dim, keepdim, -1)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the largest value; with ``dim``, as torch, the :class:`ValuesAndIndices` along that axis."""
        return self.amax() if dim is None else self._at(self.data.argmax(axis=dim, keepdims=True), dim, keepdim)

    def min(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the smallest value; with ``dim``, as torch, the :class:`ValuesAndIndices` along that axis."""
        return self.amin() if dim is None else self._at(self.data.argmin(axis=dim, keepdims=True), dim, keepdim)

    def _at(self, index: Array, dim: int, keepdim: bool) -> ValuesAndIndices:
        """Return the elements at ``index`` along ``dim``, and the index."""
        values = reduction.TakeAlong.apply(self, index, dim)
        return (
            ValuesAndIndices(values, _constant(index))
            if keepdim
            else ValuesAndIndices(values.squeeze(dim), _constant(index.squeeze(dim)))
        )

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return where the largest values are along an axis, or in the flattened tensor."""
        return _constant(array_namespace(self.data).argmax(self.data, axis=dim, keepdims=keepdim))

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return where the smallest values are along an axis, or in the flattened tensor."""
        return _constant(array_namespace(self.data).argmin(self.data, axis=dim, keepdims=keepdim))

    def cumsum(self, dim: int) -> Tensor:
        """Return the running sums along an axis."""
        return reduction.CumulativeSum.apply(self, dim)

    # -- shape -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple):
            index = tuple(_values(part) for part in index)
        return shaping.Index.apply(self, _values(index))

    def reshape(self, *shape: Any) -> Tensor:
        """Return the values in another shape, given as numbers or as one tuple; one length may be -1."""
        return shaping.Reshape.apply(self, _lengths(shape))

    def view(self, *shape: Any) -> Tensor:
        """Return the values in another shape; unlike torch's, copies where the layout demands it."""
        return shaping.Reshape.apply(self, _lengths(shape))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Return the tensor with the axes from ``start_dim`` to ``end_dim`` made one."""
        shape = self.data.shape or (1,)
        first, last = (normalize_axis_index(dim, len(shape)) for dim in (start_dim, end_dim))
        if first > last:
            raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
        return shaping.Reshape.apply(self, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))

    def squeeze(self, dim: int | None = None) -> Tensor:
        """Return the tensor without its axes of length 1, or without that one if its length is 1."""
        shape = self.data.shape
        gone = range(len(shape)) if dim is None else (normalize_axis_index(dim, len(shape) or 1),)
        return self.reshape(tuple(n for i, n in enumerate(shape) if n != 1 or i not in gone))

    def unsqueeze(self, dim: int) -> Tensor:
        """Return the tensor with an axis of length 1 at ``dim``."""
        shape = list(self.data.shape)
        shape.insert(normalize_axis_index(dim, len(shape) + 1), 1)
        return self.reshape(tuple(shape))

    @property
    def T(self) -> Tensor:  # noqa: N802 (NumPy's and torch's name)
        """The axes in reverse order."""
        return shaping.Transpose.apply(self, tuple(range(self.data.ndim))[::-1])

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Return the tensor with two axes exchanged."""
        axes = list(range(self.data.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return shaping.Transpose.apply(self, tuple(axes))

    def permute(self, *dims: Any) -> Tensor:
        """Return the tensor with its axes in the order ``dims``."""
        return shaping.Transpose.apply(self, _lengths(dims))

    def expand(self, *shape: Any) -> Tensor:
        """Return the tensor repeated along axes of length 1, without a copy; -1 keeps an axis."""
        return shaping.Expand.apply(self, _lengths(shape))

    # -- the tape --------------------------------------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Let gradients flow to this leaf, or not; return it."""
        if self.grad_fn is not None and not requires_grad:
            raise RuntimeError(
                "you can only change requires_grad flags of leaf variables. If you want to use a computed variable in "
                "a subgraph that doesn't require differentiation use var_no_grad = var.detach()."
            )
        if requires_grad and not is_differentiable(self.data):
            raise RuntimeError("only Tensors of floating point and complex dtype can require gradients")
        self.requires_grad = requires_grad
        return self

    def detach(self) -> Tensor:
        """Return a tensor on the same array that the tape does not know."""
        return Tensor(self.data)

    def backward(self, gradient: Any = None, retain_graph: bool = False) -> None:
        """Add the gradient of this tensor to ``grad`` of every leaf behind it.

        Parameters
        ----------
        gradient : array or Tensor, optional
            The weight of each element, of this tensor's shape; 1 for a tensor of one element.
        retain_graph : bool, default False
            Keep the graph for another backward; else it is freed on the way.

        Raises
        ------
        RuntimeError
            Nothing requires a gradient, a gradient is missing or of the wrong shape, or the graph has been freed; texts
            are torch's.

        Notes
        -----
        A leaf's gradient is final once the last operation that used it has run; then its
        :meth:`register_post_accumulate_grad_hook` hooks run, once for each leaf, in the order in which gradients become
        final: the model's last layers first.
        """
        if not self.requires_grad:
            raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
        if gradient is None:
            if self.data.size != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            gradient = array_namespace(self.data).ones_like(self.data)
        else:
            gradient = gradient.data if isinstance(gradient, Variable) else gradient
            gradient = array_namespace(self.data).asarray(gradient, dtype=self.data.dtype)
            if gradient.shape != self.data.shape:
                raise RuntimeError(
                    f"Mismatch in shape: grad_output[0] has a shape of {gradient.shape} and output[0] has a shape of "
                    f"{self.data.shape}."
                )
        run_backward(self, gradient, retain_graph)

    def register_hook(self, hook: Callable[[Array], Any]) -> RemovableHandle:
        """Call ``hook(gradient)`` with this tensor's gradient in each backward; an array it returns takes its place."""
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if self.grad_fn is None:
            if self.grad_hooks is None:
                self.grad_hooks = {}
            return RemovableHandle(self.grad_hooks, hook)
        if self.grad_fn.hooks is None:
            self.grad_fn.hooks = {}
        return RemovableHandle(self.grad_fn.hooks, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], object]) -> RemovableHandle:
        """Call ``hook(leaf)`` in each backward once this leaf's ``grad`` is final.

        Raises
        ------
        RuntimeError
            This tensor is no leaf, or does not require a gradient.
        """
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if self.grad_fn is not None:
            raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
        if self.post_accumulate_grad_hooks is None:
            self.post_accumulate_grad_hooks = {}
        return RemovableHandle(self.post_accumulate_grad_hooks, hook)


class ValuesAndIndices(NamedTuple):
    """What ``max`` and ``min`` along an axis return."""

    values: Tensor
    indices: Tensor


def _constant(array: Array) -> Tensor:
    """Return a tensor that the tape does not know."""
    return Function.output_type(array)


def _values(operand: Any) -> Any:
    """Return a tensor's array, and anything else as it is."""
    return operand.data if isinstance(operand, Variable) else operand


def _lengths(numbers: tuple[Any, ...]) -> Shape:
    """Return ``f(2, 3)``'s and ``f((2, 3))``'s arguments alike."""
    return tuple(numbers[0]) if len(numbers) == 1 and isinstance(numbers[0], tuple | list) else numbers


Function.output_type = Tensor
