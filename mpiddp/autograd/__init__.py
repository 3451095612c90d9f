"""A tape on arrays: tensors that remember their origin, and a backward that fills the leaves' gradients.

It knows neither networks nor MPI. A leaf may have a ``grad_slot``, memory in which its gradient is written first: with
DistributedDataParallel that is a part of the bucket that is sent.
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
