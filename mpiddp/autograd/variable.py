"""What the tape knows of a tensor: its array, its gradient, where it came from and who listens.

Imports the namespace lookup and the hooks' handle. The operators that make a :class:`Variable` pleasant are
:class:`mpiddp.autograd.Tensor`'s.
"""

from __future__ import annotations

from typing import Any

from mpiddp.device import array_namespace
from mpiddp.typing import Array

from .hooks import Hooks


def as_array(data: Any) -> Array:
    """Return ``data`` as an array; Python floats become float32, the default dtype."""
    array = array_namespace(data).asarray(data)
    if array.dtype == "float64" and not hasattr(data, "dtype"):
        array = array.astype("float32")
    return array  # type: ignore[no-any-return]


def is_differentiable(array: Array) -> bool:
    """Tell whether an array of this dtype can have a gradient (bfloat16, NumPy's kind ``V``, can)."""
    return array.dtype.kind in "fcV"


class Variable:
    """An array with a place on the tape.

    A variable without ``grad_fn`` is a leaf. The class attributes are the state of most variables; an instance holds
    only what differs, which makes an operation's output cheap.
    """

    data: Array
    """The array; assignable. The tape keeps arrays, not copies: do not write to one between forward and backward."""
    grad: Array | None = None
    """A leaf's gradient: None, or an array of the shape and dtype of ``data`` in C order."""
    requires_grad: bool = False
    """Whether gradients flow to this variable."""
    grad_slot: Array | None = None
    """A leaf's place for its gradient: the first accumulation writes here and makes it ``grad``."""
    grad_fn: Any = None
    """The node of the tape whose output this is (a :class:`Function`), None for a leaf."""
    grad_hooks: Hooks | None = None
    """A leaf's hooks that see, and may replace, a backward's gradient before it is accumulated."""
    post_accumulate_grad_hooks: Hooks | None = None
    """A leaf's hooks that run once ``grad`` is final."""
