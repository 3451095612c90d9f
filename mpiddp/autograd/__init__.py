"""A tape on arrays: tensors that remember their origin, and a backward that fills the leaves' gradients.

It knows neither networks nor MPI; a gradient to be sent is born in its leaf's ``grad_slot``.
"""

from mpiddp import moved

from .engine import queue_callback
from .function import Function, RemovableHandle, enable_grad, is_grad_enabled, no_grad
from .gradcheck import gradcheck
from .tensor import Tensor, cat, maximum, minimum, stack, where

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

moved.explain(__name__)
