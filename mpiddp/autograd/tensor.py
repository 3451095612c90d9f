"""The tensor: an array on the tape, its gradient, and what hears of it.

Imports the operators and the engine. Methods have torch's names and argument names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpiddp.device import array_namespace, download
from mpiddp.errors import ArrayError
from mpiddp.typing import Array, DTypeLike, Shape

from .engine import run_backward
from .function import Function
from .hooks import RemovableHandle
from .operators import Operators
from .variable import Variable, as_array, is_differentiable


class Tensor(Operators):
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


Function.output_type = Tensor
