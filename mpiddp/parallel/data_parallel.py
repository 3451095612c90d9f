"""DataParallel: one process cuts each batch into parts, and runs the model on them in parallel threads."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor, cat, enable_grad, is_grad_enabled, no_grad
from mpiddp.device import device_count, is_device_array
from mpiddp.device.place import Place, at, conversion, current_stream, moved, place_of
from mpiddp.nested import children, leaves, map_nested
from mpiddp.nn import Module

_PER_THREAD = 2
"""CUDA's handle for the default stream of the calling thread, which CuPy uses if the environment has
``CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1``."""


class DataParallel(Module):
    """A model that cuts each batch into parts, one for each device, and joins the outputs (``torch.nn.DataParallel``).

    A part has ``ceil(n / devices)`` samples, the last one perhaps fewer; short batches make fewer parts. Every forward
    copies the parts, the parameters and the buffers to the devices; on the host it copies the buffers only. Each part
    has a thread. Backward runs in one thread, and adds up the parameters' gradients on the first device, beginning with
    the last part. The first part runs the model itself, whose buffers it updates; the others run copies.

    Prefer `DistributedDataParallel`. With `DataParallel` the first device holds more data than the others, and all
    threads share one Python interpreter.

    Parameters
    ----------
    module : Module
        The model. Its parameters get the sum of all parts' gradients.
    device_ids : sequence of int or str, optional
        A device for each part: the number of a GPU, ``"cuda:N"``, or ``"cpu"``. All are GPUs, or all are ``"cpu"``. The
        model has to be on the first device. The default is all visible GPUs for a model on a GPU, else ``["cpu",
        "cpu"]``, which gives two threads.
    output_device : int or str, optional
        The device of the outputs, by default the first device. To compute with outputs on a GPU, make that GPU current.
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
        if device_ids is None:
            on_device = any(is_device_array(parameter.data) for parameter in module.parameters())
            device_ids = list(range(device_count())) if on_device else ["cpu", "cpu"]
        places: list[Any] = [conversion(device).place for device in device_ids]
        if {type(place) for place in places} not in ({int}, {type(None)}):
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
        outputs = _parallel(self.module, parts, self._places[: len(parts)])
        alone = len(parts) == 1 and self._output_place == first
        return outputs[0] if alone else gather(outputs, self._output_place, self.dim)


def _name(place: object) -> str:
    return "cpu" if place is None else f"cuda:{place}"


def _to(x: Any, place: Place) -> Any:
    return x.to(_name(place)) if isinstance(x, Tensor) else moved(x, place)


def _is_batch(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or is_device_array(value)


def scatter(value: Any, places: Sequence[Place], dim: int = 0) -> list[Any]:
    """Return a part of a nested value for each place, with parts of its arrays and tensors. Other values go to all.

    A place is the number of a GPU, or None for the host.

    >>> import numpy as np
    >>> [part.shape for part in scatter(np.zeros((30, 2)), [None] * 4)]
    [(8, 2), (8, 2), (8, 2), (6, 2)]
    """
    length = max((x.shape[dim] for x in leaves(value) if _is_batch(x)), default=0) or 1
    each = -(-length // len(places))

    def cut(x: Any, start: int, place: Place) -> Any:
        if not _is_batch(x):
            return x
        return _to(x[(slice(None),) * (dim % x.ndim) + (slice(start, start + each),)], place)

    parts = zip(range(0, length, each), places, strict=False)
    return [map_nested(partial(cut, start=start, place=place), value) for start, place in parts]


def _replica(module: Module, place: Place) -> Module:
    """Return a copy of a module at a place. At the module's own place the copy shares the parameters' memory."""
    with at(place):
        new: dict[int, Any] = {id(buffer): moved(buffer, place).copy() for buffer in module.buffers()}
    new |= {id(p): _to(p, place) for p in module.parameters()} | {id(m): copy.copy(m) for m in module.modules()}
    for original in module.modules():
        state = vars(new[id(original)])
        state.update({name: new.get(id(state[name])) for name in original._kinds})
    return new[id(module)]  # type: ignore[no-any-return]


def _parallel(module: Module, parts: Sequence[tuple[Any, dict[str, Any]]], places: Sequence[Place]) -> list[Any]:
    """Run the module on the first part in this thread, and a replica on each other part in a thread of its own.

    In all threads the current stream of a device is the one that this thread has, so that GPU work keeps its order.
    """
    modules = [module, *(_replica(module, place) for place in places[1:])]
    recording, streams = is_grad_enabled(), [_settled(place) for place in places]

    def call(index: int) -> Any:
        inputs, kwargs = parts[index]
        with enable_grad() if recording else no_grad(), at(places[index], streams[index]):
            try:
                output = modules[index](*inputs, **kwargs)
            except Exception as error:
                error.add_note(f"Caught {type(error).__name__} in replica {index} of {len(modules)}.")
                raise
            _settled(places[index])
            return output

    if len(parts) == 1:
        return [call(0)]
    with ThreadPoolExecutor(len(parts), "mpiddp-data-parallel") as pool:
        others = pool.map(call, range(1, len(parts)))
        return [call(0), *others]


def _settled(place: Place) -> Any:
    """Return the current stream of a place, for use in another thread.

    If it is the thread's own default stream, wait for the work in it first: CUDA does not order the work of other
    threads after that work.
    """
    stream = current_stream(place)
    if stream is not None and stream.ptr == _PER_THREAD:
        with at(place):
            stream.synchronize()
    return stream


def gather(outputs: Sequence[Any], place: Any = None, dim: int = 0) -> Any:
    """Join the parts' outputs, which have the same nested structure, at a place. Scalars become a vector."""
    first = outputs[0]
    if _is_batch(first):
        parts = [_to(x.reshape(1) if x.ndim == 0 else x, place) for x in outputs]
        with at(place):
            whole = cat(parts, dim if first.ndim else 0)
        return whole if isinstance(first, Tensor) else whole.data
    nested = [children(output) for output in outputs]
    if nested[0] is None:
        raise TypeError(f"outputs must be tensors, arrays, tuples, lists or dicts, got {type(first).__name__}")
    columns = zip(*(found[0] for found in nested if found is not None), strict=True)
    return nested[0][1]([gather(column, place, dim) for column in columns])
