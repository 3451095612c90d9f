"""A tape on arrays: tensors that remember their origin, and a backward that fills the leaves' gradients.

It knows neither networks nor MPI. A leaf may have a ``grad_slot``, memory in which its gradient is written first: with
DistributedDataParallel that is a part of the bucket that is sent.
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
