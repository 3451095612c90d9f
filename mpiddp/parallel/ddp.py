"""DistributedDataParallel: a model whose gradients are averaged over all ranks while backward runs."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from mpiddp.autograd import Function, Tensor, is_grad_enabled, queue_callback
from mpiddp.distributed.groups import default_group
from mpiddp.nested import children
from mpiddp.nn import Module
from mpiddp.typing import Array

from .reducer import Reducer
from .sync_batchnorm import SyncBatchNorm
from .wrapper import Wrapper


class DistributedDataParallel(Wrapper, Module):
    """A replica of a model on every rank, with gradients averaged over all ranks, as torch's.

    Scaling is torch's, bit for bit: each gradient times ``fl(1/N)``, summed in rank order. Parameters that require a
    gradient at construction are averaged: to train others later, `detach` and wrap again. ``copy.deepcopy`` and
    unpickling wrap a copy with the same options and buckets, without hooks, collectively over the default group.

    Parameters
    ----------
    module : Module
        Its parameters' arrays are moved side by side in memory and get the first rank's values.
    device_ids, output_device, dim, check_reduction, gradient_as_bucket_view, batched_grad_copy
        For compatibility: a model is where its arrays are, gradients are views of their bucket.
    broadcast_buffers : bool, optional
        Older name of ``forward_sync_buffers``; False: not at construction, either.
    init_sync : bool
        Check that parameters are alike and copy the first rank's values.
    process_group : ProcessGroup, optional
    bucket_cap_mb : float, optional
        MiB at which a bucket is closed: 25, and 1 for the last bucket, which no computation hides (torch: the first).
    bucket_cap_mb_list : sequence of float, optional
        The same of the first, second, ... bucket.
    find_unused_parameters : bool
        Allow parameters without a gradient. ``grad`` stays None if no rank has one; else missing ones are zeros.
    static_graph : bool
        The unused parameters are those of the first iteration.
    mixed_precision
        Not offered; see `fp16_compress_hook` and `bf16_compress_hook`.
    forward_sync_buffers : bool, optional
        Copy the first rank's buffers before every forward that follows a reduced backward; default True.
    skip_all_reduce_unused_params : bool
        With ``find_unused_parameters``: do not send buckets of unused parameters, which must be the same on all ranks
        (else a timeout). A rank without samples runs an empty batch.

    Raises
    ------
    RuntimeError
        On every rank, if ranks hold different parameters; if none requires a gradient.
    ValueError
        An inner wrapper averages some of the parameters; an option is out of range.

    References
    ----------
    S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    Examples
    --------
    >>> model = dist.DistributedDataParallel(net)  # doctest: +SKIP
    >>> F.nll_loss(model(images), labels).backward()  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
    """

    _is_grad_enabled = staticmethod(is_grad_enabled)
    _queue_callback = staticmethod(queue_callback)
    _sync_batchnorm_type = SyncBatchNorm

    @staticmethod
    def _check_module(module: object) -> None:
        if not isinstance(module, Module):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            also = "; mpiddp.torch.DistributedDataParallel takes torch's" if hasattr(module, "named_parameters") else ""
            raise TypeError(f"mpiddp.DistributedDataParallel needs an mpiddp.nn.Module, got {kind}{also}")

    def _register_output_hook(self, output: Any) -> Any:
        return hooked(output, self._reducer)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.process_group is not default_group():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: copy or"
                " pickle ddp.module, and wrap the copy on all ranks"
            )
        return _wrapped_anew, (self.module, self._options, self.training, self.bucket_order())


def _wrapped_anew(
    module: Module, options: dict[str, Any], training: bool, order: list[int] | None
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module, init_sync=False, **options)
    ddp.training = training
    if order is not None:
        ddp.install_bucket_order(order)
    return ddp


class _OutputHook(Function):
    """The identity on an output; its backward, which runs first, calls `Reducer.begin`."""

    def forward(self, x: Array, reducer: Reducer) -> Array:
        self.reducer = reducer
        return x

    def backward(self, grad: Array) -> tuple[Array, None]:
        self.reducer.begin()
        return grad, None


def hooked(output: Any, reducer: Reducer) -> Any:
    """Set the hook on tensors of a nested output; with other types the reducer begins with the first gradient."""
    if isinstance(output, Tensor):
        return _OutputHook.apply(output, reducer) if output.requires_grad else output
    found = children(output)
    if found is not None:
        return found[1]([hooked(value, reducer) for value in found[0]])
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        record: Any = copy.copy(output)
        for field in dataclasses.fields(output):
            # A frozen dataclass has no other setter.
            object.__setattr__(record, field.name, hooked(getattr(output, field.name), reducer))
        return record
    if output is not None:
        reducer.expect_backward()
    return output
