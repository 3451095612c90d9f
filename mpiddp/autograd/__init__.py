"""A tape on arrays: tensors that remember their origin, and a backward that fills the leaves' gradients.

The package knows neither networks nor MPI. A leaf may have a ``grad_slot``, memory into which backward writes the
gradient. DistributedDataParallel makes it a part of the bucket that is sent, so the gradient need not be copied.
"""

from mpiddp import moved

from .engine import queue_callback as queue_callback
from .function import (
    Function as Function,
    RemovableHandle as RemovableHandle,
    enable_grad as enable_grad,
    is_grad_enabled as is_grad_enabled,
    no_grad as no_grad,
)
from .gradcheck import gradcheck as gradcheck
from .tensor import Tensor as Tensor, cat as cat, stack as stack, where as where

moved.explain(__name__)
