"""mpiddp's DistributedDataParallel for modules of torch. It uses the same `Reducer` and `Buckets` as mpiddp's own.

torch's autograd computes the gradients. A hook on each parameter moves its gradient into a bucket of symmetric memory,
and ``grad`` is then a view of the bucket. Modules must be in host memory. For a module on a GPU use torch's own
DistributedDataParallel on the backend "mpiddp".
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from mpiddp.parallel.buckets import ParameterLike
from mpiddp.parallel.wrapper import Wrapper
from mpiddp.typing import Array

from .arrays import as_array, as_tensor


class Parameter:
    """A torch parameter with the attributes of `mpiddp.nn.Parameter` that a reducer uses."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.requires_grad = parameter.requires_grad
        self._slot: Array | None = None
        self._view: torch.Tensor | None = None

    @property
    def data(self) -> Array:
        return as_array(self.parameter)

    @data.setter
    def data(self, array: Array) -> None:
        self.parameter.data = as_tensor(array)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def grad_slot(self) -> Array | None:
        """The part of a bucket that holds this parameter's gradient."""
        return self._slot

    @grad_slot.setter
    def grad_slot(self, slot: Array | None) -> None:
        self._slot, self._view = slot, None if slot is None else as_tensor(slot)

    @property
    def grad(self) -> Array | None:
        """The gradient as an array. If the gradient lies in the bucket, the array is `grad_slot` itself."""
        found = self.parameter.grad
        if found is None:
            return None
        if self._view is not None and found.data_ptr() == self._view.data_ptr():
            return self._slot
        return as_array(found)

    @grad.setter
    def grad(self, array: Array | None) -> None:
        if array is not None and array is not self._slot:
            self.grad_slot = array
        self.parameter.grad = None if array is None else self._view

    def register_post_accumulate_grad_hook(self, hook: "Callable[[Parameter], object]") -> Any:
        """Call ``hook`` with this parameter when its gradient is final."""
        return self.parameter.register_post_accumulate_grad_hook(lambda _: hook(self))


class DistributedDataParallel(Wrapper, torch.nn.Module):
    """A torch module on every rank, with gradients averaged over all ranks.

    Options, methods (``no_sync``, ``join``, ``register_comm_hook``, ...) and errors are those of
    `mpiddp.DistributedDataParallel`, except that there are no virtual ranks. Communication hooks get NumPy arrays.

    Parameters
    ----------
    module : torch.nn.Module
        The model, in host memory (else ValueError). Its trained parameters are moved side by side into one array for
        each dtype. With ``init_sync`` all parameters take the first rank's values.
    process_group : distributed.ProcessGroup, optional
        A group of mpiddp, all ranks by default. For a torch group of the backend "mpiddp", pass its attribute
        ``group``.
    """

    _is_grad_enabled = staticmethod(torch.is_grad_enabled)
    _module_type = torch.nn.Module
    _sync_batchnorm_type = torch.nn.SyncBatchNorm

    @staticmethod
    def _queue_callback(callback: Callable[[], object]) -> None:
        Variable._execution_engine.queue_callback(callback)

    def _as_parameter(self, name: str, parameter: torch.nn.Parameter) -> ParameterLike:
        if not parameter.is_cpu:
            raise ValueError(
                f"{name} is on {parameter.device}: this one reduces in the host's memory; use"
                ' torch.nn.parallel.DistributedDataParallel on init_process_group("mpiddp")'
            )
        return Parameter(parameter)

    def _as_array(self, buffer: torch.Tensor) -> Array:
        return as_array(buffer)

    def _register_output_hook(self, output: Any) -> Any:
        self._reducer.expect_backward()  # the first gradient begins the backward if no output has a hook
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                each.register_hook(lambda _: self._reducer.begin())
        return output
