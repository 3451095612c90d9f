"""DataParallel: one process, one batch cut into parts, the model applied to them in parallel threads."""

import copy
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor, cat, enable_grad, is_grad_enabled, no_grad
from mpiddp.device import array_namespace, device_count, is_device_array
from mpiddp.device.place import Place, at, conversion, current_stream, moved, place_of
from mpiddp.nested import children, leaves, map_nested
from mpiddp.nn import Module

_PER_THREAD = 2
"""The address of each thread's own default stream (``CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1``)."""


class DataParallel(Module):
    """A model that cuts each batch into parts, one for each device, and joins the outputs (``torch.nn.DataParallel``).

    A part has ``ceil(n / devices)`` samples, the last one perhaps fewer; short batches make fewer parts. Every forward
    copies parts and parameters to the devices; on the host nothing is copied. Each part has a thread. Backward runs in
    one thread, and adds up the parameters' gradients on the first device, beginning with the last part. The first
    replica shares its buffers with the model.

    Prefer `DistributedDataParallel`: here the first device holds more than others, and threads share an interpreter.

    Parameters
    ----------
    module : Module
        Its parameters get the sum of all parts' gradients.
    device_ids : sequence of int or str, optional
        One for each part: a GPU's number, ``"cuda:N"``, or ``"cpu"``, not both kinds; the model is on the first. By
        default all visible GPUs for a model on one, else ``["cpu", "cpu"]``: two threads.
    output_device : int or str, optional
        By default the first. Make a GPU current to go on with the outputs.
    dim : int
        The axis of the batch.

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
        device_ids: Sequence[int | str] | None = None,
        output_device: int | str | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if device_ids is None:
            on_device = any(is_device_array(parameter.data) for parameter in module.parameters())
            device_ids = list(range(device_count())) if on_device else ["cpu", "cpu"]
        places: list[Any] = [conversion(device).place for device in device_ids]
        if not places or "kept" in places or (None in places and set(places) != {None}):
            raise ValueError(
                f'DataParallel needs device_ids of one or more GPUs, or of "cpu" once for each thread, got'
                f" {list(device_ids)}; to use both start ranks, and use DistributedDataParallel"
            )
        self.module, self.dim, self._places = module, dim, places
        self._output_place: Any = places[0] if output_device is None else conversion(output_device).place
        self.device_ids, self.output_device = [_name(place) for place in places], _name(self._output_place)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Cut the arguments, run the model on the parts in parallel, and join the outputs."""
        first = self._places[0]
        for each in (*(p.data for p in self.module.parameters()), *self.module.buffers()):
            if place_of(each) != first:
                raise RuntimeError(
                    f"module must have its parameters and buffers on device {_name(first)} (device_ids[0]) but found"
                    f" one of them on device: {_name(place_of(each))}"
                )
        parts = scatter((inputs, kwargs), self._places, self.dim)
        places = self._places[: len(parts)]
        alone = len(parts) == 1
        outputs = parallel_apply([self.module] if alone else replicate(self.module, places), parts, places)
        there = alone and self._output_place == first
        return outputs[0] if there else gather(outputs, self._output_place, self.dim)


def _name(place: object) -> str:
    return "cpu" if place is None else f"cuda:{place}"


def _to(x: Any, place: Place) -> Any:
    return x.to(_name(place)) if isinstance(x, Tensor) else moved(x, place)


def _is_batch(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or is_device_array(value)


def scatter(value: Any, places: Sequence[Place], dim: int = 0) -> list[Any]:
    """Cut arrays and tensors in nested containers into a part for each place (None: host); the rest goes to all.

    >>> import numpy as np
    >>> [part.shape for part in scatter(np.zeros((30, 2)), [None] * 4)]
    [(8, 2), (8, 2), (8, 2), (6, 2)]
    """
    length = max((int(x.shape[dim]) for x in leaves(value) if _is_batch(x)), default=0)
    each = max(-(-length // len(places)), 1)

    def cut(start: int, place: Place, x: Any) -> Any:
        if not _is_batch(x):
            return x
        return _to(x[(slice(None),) * (dim % x.ndim) + (slice(start, start + each),)], place)

    starts = range(0, max(length, 1), each)
    return [
        map_nested(functools.partial(cut, start, place), value) for start, place in zip(starts, places, strict=False)
    ]


def replicate(module: Module, places: Sequence[Place]) -> list[Module]:
    """Return a replica for each place; replicas of one place share the memory of parameters."""
    replicas = []
    for index, place in enumerate(places):
        twins = {id(original): copy.copy(original) for original in module.modules()}
        tensors = {id(p): _to(p, place) for p in module.parameters()}
        with at(place):
            arrays = {id(b): b if index == 0 else moved(b, place).copy() for b in module.buffers()}
        for twin in twins.values():
            for registry, new in (("_parameters", tensors), ("_buffers", arrays), ("_modules", twins)):
                old = vars(twin)[registry]
                vars(twin)[registry] = {name: x if x is None else new[id(x)] for name, x in old.items()}
        replicas.append(twins[id(module)])
    return replicas


def parallel_apply(
    modules: Sequence[Module], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], places: Sequence[Place]
) -> list[Any]:
    """Call each module in a thread.

    A thread's current stream is the calling thread's, so that work keeps its order; threads' own default streams are
    synchronised. The first module's error is raised, with a note of its number.
    """
    recording = is_grad_enabled()
    streams = [current_stream(place) for place in places]

    def call(index: int) -> Any:
        inputs, kwargs = arguments[index]
        with enable_grad() if recording else no_grad(), at(places[index], streams[index]):
            output = modules[index](*inputs, **kwargs)
            _settle(places[index])
            return output

    for place in places:
        with at(place):
            _settle(place)
    if len(modules) == 1:
        return [call(0)]
    with ThreadPoolExecutor(len(modules), "mpiddp-data-parallel") as pool:
        futures = [pool.submit(call, index) for index in range(len(modules))]
    for index, future in enumerate(futures):
        error = future.exception()
        if error is not None:
            error.add_note(f"Caught {type(error).__name__} in replica {index} of {len(modules)}.")
            raise error
    return [future.result() for future in futures]


def _settle(place: Place) -> None:
    """Wait for this thread's work where CUDA does not order other threads' work after it."""
    stream = current_stream(place)
    if stream is not None and stream.ptr == _PER_THREAD:
        stream.synchronize()


def gather(outputs: Sequence[Any], place: Any = None, dim: int = 0) -> Any:
    """Join outputs, nested alike; scalars become a vector."""
    first = outputs[0]
    if first is None:
        return None
    if _is_batch(first):
        parts, axis = [_to(x.reshape(1) if x.ndim == 0 else x, place) for x in outputs], dim if first.ndim else 0
        with at(place):
            return cat(parts, axis) if isinstance(first, Tensor) else array_namespace(parts[0]).concatenate(parts, axis)
    nested = [children(output) for output in outputs]
    if nested[0] is None:
        raise TypeError(
            f"outputs must be tensors, arrays, or tuples, lists and dicts of them, got {type(first).__name__}"
        )
    columns = zip(*(found[0] for found in nested if found is not None), strict=True)
    return nested[0][1]([gather(column, place, dim) for column in columns])
