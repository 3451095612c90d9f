"""A tape on arrays: tensors that remember how they were made, and a backward that fills the leaves' gradients.

Knows nothing of networks nor of MPI; imports ``errors``, ``typing`` and ``device``. The one thing that is made for the
communication layer is a leaf's ``grad_slot``: an array in which its gradient is born.
"""

from .engine import queue_callback
from .function import Function, RemovableHandle, enable_grad, is_grad_enabled, no_grad
from .gradcheck import gradcheck
from .several import cat, maximum, minimum, stack, where
from .tensor import Tensor

__all__ = [
    "Function",
    "RemovableHandle",
    "Tensor",
    "cat",
    "enable_grad",
    "gradcheck",
    "is_grad_enabled",
    "maximum",
    "minimum",
    "no_grad",
    "queue_callback",
    "stack",
    "where",
]
