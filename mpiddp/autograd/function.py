"""The tape: variables, operations with a gradient, and the switch of recording.

There is no tape object: a node points at the nodes or leaves of its inputs.
"""

import contextlib
import itertools
import operator
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.exceptions import AxisError

from mpiddp.device import array_namespace, is_device_array
from mpiddp.typing import Array, Shape

_sequence = itertools.count()


Hooks = dict["RemovableHandle", Callable[..., Any]]
"""Hooks in the order of their registration, each under its handle."""


class RemovableHandle(contextlib.AbstractContextManager["RemovableHandle"]):
    """A handle that removes a registered hook, by ``remove()`` or at the end of a ``with`` block."""

    def __init__(self, hooks: Hooks, hook: Callable[..., Any]) -> None:
        self._hooks = hooks
        hooks[self] = hook

    def remove(self) -> None:
        """Remove the hook, if it is there."""
        self._hooks.pop(self, None)

    def __exit__(self, *exception: object) -> None:
        self.remove()


class _Mode(threading.local):
    enabled = True


mode = _Mode()


class _SetGradEnabled(contextlib.ContextDecorator):
    value: bool

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(mode.enabled)
        mode.enabled = self.value

    def __exit__(self, *exception: object) -> None:
        mode.enabled = self._before.pop()

    def _recreate_cm(self) -> "_SetGradEnabled":
        return type(self)()  # each call of a decorated function, in any thread, needs its own


class no_grad(_SetGradEnabled):  # noqa: N801
    """Record nothing in this block or function, in this thread."""

    value = False


class enable_grad(_SetGradEnabled):  # noqa: N801
    """Record again inside of :class:`no_grad`."""

    value = True


def is_grad_enabled() -> bool:
    """Return whether this thread records operations."""
    return mode.enabled


def as_array(data: Any) -> Array:
    """Return ``data`` as an array; Python floats become float32."""
    array = array_namespace(data).asarray(data)
    if array.dtype == "float64" and not hasattr(data, "dtype"):
        array = array.astype("float32")
    return array  # type: ignore[no-any-return]


def is_differentiable(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype can have a gradient; bfloat16 is NumPy's kind ``V``."""
    return dtype.kind in "fcV"


_TAKEN = {np.ndarray, int, float, bool, tuple, type(None), str}


def expect_array_or_option(value: object) -> None:
    """Raise TypeError for an array of a library other than NumPy and CuPy.

    Without the check such an array would compute by its own methods, and fail far from the cause.
    """
    if hasattr(value, "__dlpack__") and not (isinstance(value, np.ndarray) or is_device_array(value)):
        kind, cure = type(value), "numpy.asarray(x)"
        if kind.__module__.split(".")[0] == "torch":
            cure = "x.numpy(), or keep the model torch's and wrap it in mpiddp.torch.DistributedDataParallel"
        raise TypeError(
            f"mpiddp computes with NumPy and CuPy arrays and mpiddp.autograd.Tensor, got {kind.__module__}."
            f"{kind.__qualname__}: pass {cure}"
        )


class Variable:
    """An array with a place on the tape; a leaf has no ``grad_fn``.

    Defaults are class attributes, so an instance stores only the attributes that differ, which makes outputs cheap.
    """

    data: Array
    """The values. Another array may be assigned. Do not write into the values between forward and backward, because the
    tape keeps no copy.
    """
    grad: Array | None = None
    """A leaf's gradient: None, or an array of the shape and dtype of ``data`` in C order."""
    requires_grad: bool = False
    grad_slot: Array | None = None
    """Memory for a leaf's gradient. The first accumulation writes to it, and it becomes ``grad``."""
    grad_fn: Any = None

    post_accumulate_grad_hooks: Hooks | None = None
    """Hooks of a leaf, which backward calls when the leaf's ``grad`` is final."""


class Function:
    """An operation with a gradient; an instance is one use of it, and a node of the tape.

    A subclass defines ``forward(self, *inputs)`` on arrays, which returns one array, and ``backward(self, grad)``,
    which returns a gradient, or None, for each input up to the last one with a gradient. Attributes of ``self`` are
    kept until backward. torch's static methods with a ``ctx`` work, too.

    ``backward`` must not write to ``grad``, which other nodes may hold. It returns ``grad``, a view of it, or an array
    that nothing else holds. If ``self.out(index)`` is not None, it is best to write the gradient into that array and to
    return it. It is the ``grad_slot`` of a leaf, so nothing is copied.

    Examples
    --------
    >>> import numpy as np
    >>> from mpiddp.autograd import Function, Tensor
    >>> class Square(Function):
    ...     def forward(self, x):
    ...         self.x = x
    ...         return x * x
    ...
    ...     def backward(self, grad):
    ...         return 2 * self.x * grad
    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> Square.apply(x).sum().backward()
    >>> x.grad
    array([2., 4.], dtype=float32)
    """

    forward: ClassVar[Callable[..., Any]]
    backward: ClassVar[Callable[..., Any]]
    output_type: ClassVar[Any] = Variable
    """Class of outputs: `Tensor`, whose module imports this one and sets it here."""

    edges: "tuple[Variable | Function | None, ...] | None" = None
    """The node or leaf of each input, or None for an input without a gradient. A freed node has no tuple but None."""
    sequence: int
    """A number larger than those of the inputs' nodes: backward runs the nodes from the largest to the smallest."""
    output_dtype: np.dtype[Any]
    """Dtype of the output, and so of the gradient that backward gets."""
    saved_tensors: tuple[Any, ...] = ()

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """Run the operation on tensors, arrays and options; record it if a tensor requires a gradient."""
        node = cls()
        arrays: list[Any] = []
        edges: list[Variable | Function | None] = []
        recorded = False
        recording = mode.enabled
        for value in inputs:
            if isinstance(value, Variable):
                arrays.append(value.data)
                if recording and value.requires_grad:
                    edges.append(value.grad_fn or value)
                    recorded = True
                    continue
            else:
                if type(value) not in _TAKEN:
                    expect_array_or_option(value)
                arrays.append(value)
            edges.append(None)
        node.edges = tuple(edges)
        data = cls.forward(node, *arrays)
        output = cls.output_type.__new__(cls.output_type)
        output.data = np.asarray(data) if isinstance(data, np.generic) else data
        if recorded:
            node.sequence = next(_sequence)
            node.output_dtype = output.data.dtype
            output.requires_grad = True
            output.grad_fn = node
        return output

    def needs(self, index: int) -> bool:
        """Return whether input ``index`` needs a gradient."""
        return self.edges is not None and self.edges[index] is not None

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """The results of `needs` for all inputs, under torch's name."""
        return tuple(edge is not None for edge in self.edges or ())

    def save_for_backward(self, *arrays: Any) -> None:
        """Keep arrays as ``saved_tensors``."""
        self.saved_tensors = arrays

    def out(self, index: int) -> Array | None:
        """Return the ``grad_slot`` into which backward may write the gradient of input ``index``, or None."""
        edges = self.edges or ()
        leaf = edges[index]
        if (
            not isinstance(leaf, Variable)
            or leaf.grad_slot is None
            or leaf.grad is not None
            # An input that occurs twice has two gradients, but only one slot.
            or sum(edge is leaf for edge in edges) > 1
        ):
            return None
        return leaf.grad_slot

    def release(self) -> None:
        """Drop everything kept for backward, and the edges."""
        vars(self).clear()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def unbroadcast(grad: Array, shape: Shape) -> Array:
    """Sum ``grad`` over the axes along which an operand of ``shape`` was repeated."""
    if grad.shape == shape:
        return grad
    extra = grad.ndim - len(shape)
    repeated = tuple(i + extra for i, n in enumerate(shape) if n == 1 and grad.shape[i + extra] != 1)
    axes = tuple(range(extra)) + repeated
    return grad.sum(axis=axes, keepdims=True).reshape(shape) if axes else grad.reshape(shape)


def normalize_axis_index(axis: int, ndim: int) -> int:
    """Return ``axis`` counted from the first axis. NumPy's function of this name is public only since 2.0."""
    axis = operator.index(axis)
    if not -ndim <= axis < ndim:
        raise AxisError(axis, ndim)
    return axis % ndim


def constant(array: Any) -> Any:
    """Return an array as a tensor that is not on the tape."""
    return Function.output_type(array)


def values_of(operand: Any) -> Any:
    return operand.data if isinstance(operand, Variable) else operand
