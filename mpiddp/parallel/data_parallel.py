"""DataParallel: one process, one batch cut into parts, the model applied to them in parallel threads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mpiddp.autograd import Function, Tensor, cat, enable_grad, is_grad_enabled, no_grad
from mpiddp.device import array_namespace, is_device_array
from mpiddp.nn import Module
from mpiddp.typing import Array


class _Replica(Function):
    """A parameter as one replica sees it: a tensor of its own on the same memory; gradients of all add up."""

    def forward(self, x: Array) -> Array:
        return x

    def backward(self, grad: Array) -> Array:
        return grad


class DataParallel(Module):
    """A model that cuts each batch into parts, one for each device, and joins what comes out.

    Parameters
    ----------
    module : Module
        The model; its parameters get the sum of all parts' gradients.
    device_ids : sequence of str, default ``["cpu", "cpu"]``
        One entry for each part. Only ``"cpu"``: the parts run in threads, which NumPy lets run at once inside of large
        operations.
    output_device : str, optional
        Where outputs are joined; ``"cpu"``.
    dim : int, default 0
        The axis of the batch.

    Raises
    ------
    ValueError
        For a device other than ``"cpu"``: on GPUs use one rank for each and `DistributedDataParallel`.

    Notes
    -----
    A batch of n becomes parts of ``ceil(n / devices)``, the last one smaller, and fewer parts than devices where it is
    short. Parameters are not copied on the host. The first replica's buffers are the model's own, those of the others
    are copies that are dropped.

    On GPUs the first device of such a scheme holds all outputs, their loss, the sums of gradients and the optimizer's
    state besides what every device holds: parameters, its part of the batch, and what the tape keeps. For the
    perceptron 784-256-256-10, SGD with momentum and a batch of 128 on two devices that is 3.8 MB on the first and
    1.7 MB on the second (arrays counted by the tests): the first is full when the others are not. And threads share one
    interpreter. That is why `DistributedDataParallel`, where all hold the same, is preferred everywhere.

    References
    ----------
    ``torch.nn.DataParallel``.

    Examples
    --------
    >>> from mpiddp import nn
    >>> model = DataParallel(nn.Linear(5, 2), device_ids=["cpu", "cpu", "cpu"])
    >>> model(np.ones((30, 5), np.float32)).shape
    (30, 2)
    """

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[str] | None = None,
        output_device: str | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        devices = ["cpu", "cpu"] if device_ids is None else list(device_ids)
        odd = [device for device in (*devices, output_device or "cpu") if device != "cpu"]
        if odd or not devices:
            raise ValueError(
                f'DataParallel needs device_ids of "cpu", one for each thread, got {devices} and output_device='
                f"{output_device!r}; on GPUs start one rank for each and use DistributedDataParallel"
            )
        self.module = module
        self.device_ids, self.output_device, self.dim = devices, output_device or "cpu", dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Cut the arguments, run the model on the parts in parallel, and join the outputs."""
        parts = scatter((inputs, kwargs), len(self.device_ids), self.dim)
        if len(parts) == 1:
            return self.module(*parts[0][0], **parts[0][1])
        replicas = replicate(self.module, len(parts))
        return gather(parallel_apply(replicas, parts), self.dim)


def _is_batch(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or is_device_array(value)


def _longest(value: Any, dim: int) -> int:
    """Return the length of the longest batch in nested arguments; 0 without one."""
    if _is_batch(value):
        return int(value.shape[dim])
    if isinstance(value, dict):
        value = list(value.values())
    return max((_longest(each, dim) for each in value), default=0) if isinstance(value, (list, tuple)) else 0


def scatter(value: Any, count: int, dim: int = 0) -> list[Any]:
    """Cut every array and tensor in nested tuples, lists and dicts into parts; what else is there goes to all.

    Parameters
    ----------
    value : Any
        The arguments.
    count : int
        Parts to make, at most; the first ones have ``ceil(n / count)`` elements.
    dim : int, default 0
        The axis to cut.

    Returns
    -------
    list
        The parts, each nested as ``value`` is. Batches are as long as each other.

    Examples
    --------
    >>> import numpy as np
    >>> [part.shape for part in scatter(np.zeros((30, 2)), 4)]
    [(8, 2), (8, 2), (8, 2), (6, 2)]
    """
    length = _longest(value, dim)
    each = max(-(-length // count), 1)
    starts = range(0, max(length, 1), each)
    return [_part(value, start, start + each, dim) for start in starts]


def _part(value: Any, start: int, stop: int, dim: int) -> Any:
    if _is_batch(value):
        return value[(slice(None),) * (dim % value.ndim) + (slice(start, stop),)]
    if isinstance(value, dict):
        return {key: _part(each, start, stop, dim) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(each, start, stop, dim) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_part(each, start, stop, dim) for each in value)
    return value


def replicate(module: Module, count: int) -> list[Module]:
    """Return replicas of a module that share its parameters' memory, for use in as many threads."""
    replicas = []
    for index in range(count):
        made: dict[int, Module] = {}
        tensors = {id(p): _Replica.apply(p) for p in module.parameters()}
        for original in module.modules():
            twin = copy.copy(original)
            state = vars(twin)
            state["_parameters"] = {
                name: p if p is None else tensors[id(p)] for name, p in original._parameters.items()
            }
            state["_buffers"] = {
                name: b if b is None or index == 0 else b.copy() for name, b in original._buffers.items()
            }
            made[id(original)] = twin
        for original in module.modules():
            vars(made[id(original)])["_modules"] = {
                name: child if child is None else made[id(child)] for name, child in original._modules.items()
            }
        replicas.append(made[id(module)])
    return replicas


def parallel_apply(modules: Sequence[Module], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    """Call each module with its positional and keyword arguments, in parallel threads; return the outputs.

    Raises
    ------
    Exception
        The first module's that failed, with a note that says which.
    """
    recording = is_grad_enabled()

    def call(index: int) -> Any:
        inputs, kwargs = arguments[index]
        with enable_grad() if recording else no_grad():
            return modules[index](*inputs, **kwargs)

    with ThreadPoolExecutor(len(modules), "mpiddp-data-parallel") as pool:
        futures = [pool.submit(call, index) for index in range(len(modules))]
    for index, future in enumerate(futures):
        error = future.exception()
        if error is not None:
            error.add_note(f"Caught {type(error).__name__} in replica {index} of {len(modules)}.")
            raise error
    return [future.result() for future in futures]


def gather(outputs: Sequence[Any], dim: int = 0) -> Any:
    """Join outputs, nested alike, along ``dim``; scalars become a vector.

    Raises
    ------
    TypeError
        For something that cannot be joined.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return cat([x.reshape(1) for x in outputs] if first.ndim == 0 else list(outputs), 0 if first.ndim == 0 else dim)
    if isinstance(first, np.ndarray) or is_device_array(first):
        xp = array_namespace(first)
        return xp.stack(outputs) if first.ndim == 0 else xp.concatenate(outputs, axis=dim)
    if first is None:
        return None
    if isinstance(first, dict):
        return type(first)((key, gather([output[key] for output in outputs], dim)) for key in first)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(gather(each, dim) for each in zip(*outputs, strict=True)))
    if isinstance(first, (list, tuple)):
        return type(first)(gather(each, dim) for each in zip(*outputs, strict=True))
    raise TypeError(f"outputs must be tensors, arrays, or tuples, lists and dicts of them, got {type(first).__name__}")
