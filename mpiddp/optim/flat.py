"""Runs of parameters that are neighbours in memory, and arrays that span them.

A data-parallel wrapper may lay out parameters, and gradients, as consecutive views of one array. Updating such a run as
a whole gives the same bits as updating each parameter, in fewer operations. An optimizer finds the runs by the arrays'
addresses, and finds them anew when the array or the gradient of a parameter has become another object.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import is_
from typing import Any, Protocol

import numpy as np

from mpiddp.device import array_namespace, is_device_array
from mpiddp.device.packing import views
from mpiddp.typing import Array, Shape

BLOCK = 1 << 18
"""Number of elements of a host array that are updated at a time, so that intermediate results stay in the cache.

A step of Adam took 11.5 ms in such blocks, and 18 ms without them.
"""

Record = dict[str, Any]
"""The state of one parameter: arrays of its shape by name, and ``step``, if the optimizer counts steps."""


class Parameter(Protocol):
    """Anything with an array and a gradient, such as :class:`mpiddp.nn.Parameter`."""

    data: Array
    grad: Array | None


def address(x: Array) -> int:
    if is_device_array(x):
        return int(x.data.ptr)  # type: ignore[attr-defined] # a host array of bfloat16 lacks it
    return int(x.__array_interface__["data"][0])


def are_adjacent(left: Array, right: Array) -> bool:
    """Return whether ``right`` begins at the end of ``left``, both contiguous views of the same memory."""
    return (
        left.base is not None
        and left.base is right.base
        and left.dtype == right.dtype
        and left.flags.c_contiguous
        and right.flags.c_contiguous
        and address(left) + left.nbytes == address(right)
    )


def flat_view(pieces: Sequence[Array]) -> Array:
    """Return a one-dimensional view of ``pieces``, each adjacent to the next."""
    first = pieces[0]
    if len(pieces) == 1:
        return first.reshape(-1)
    as_strided = array_namespace(first).lib.stride_tricks.as_strided
    return as_strided(first, (sum(piece.size for piece in pieces),), (first.itemsize,))  # type: ignore[no-any-return]


class ContiguousRun:
    """One parameter, or several adjacent parameters that an optimizer updates together.

    The states of all parameters have the same names and the same number of steps. ``data`` and ``grad`` are
    one-dimensional views over all parameters. For a single parameter that is small or not contiguous they are its own
    arrays. ``state`` has the arrays of state over all parameters; the record of each parameter holds views of them.
    """

    def __init__(self, data: Sequence[Array], grads: Sequence[Array], records: Sequence[Record]) -> None:
        self._records = records
        self._shapes: list[Shape] = [x.shape for x in data]
        # NumPy 1 computes in float64 with an array of no dimension and a number, so such a parameter is made flat.
        first, large = data[0], data[0].size > BLOCK or not data[0].ndim
        self._flat = len(data) > 1 or (large and first.flags.c_contiguous and grads[0].flags.c_contiguous)
        self.data = self._whole(data)
        self.grad = self._whole(grads)
        self.state: dict[str, Array] = {}
        for name in records[0].keys() - {"step"}:
            pieces = [record[name] for record in records]
            if all(are_adjacent(*pair) for pair in pairwise(pieces)):
                self.state[name] = self._whole(pieces)
            else:
                for piece, view in zip(pieces, self._pieces(self.new_state(name)), strict=True):
                    view[...] = piece

    def new_state(self, name: str) -> Array:
        self.state[name] = array_namespace(self.data).zeros_like(self.data)
        for record, view in zip(self._records, self._pieces(self.state[name]), strict=True):
            record[name] = view
        return self.state[name]

    def count_step(self) -> int:
        step = np.array(self._records[0].get("step", 0) + 1, np.float32)
        for record in self._records:
            record["step"] = step
        return int(step)

    def blocks(self, *names: str) -> Iterator[tuple[Array, ...]]:
        """Yield data, gradient and the named states, on the host in blocks of `BLOCK` elements.

        A state that does not exist yet begins as zeros.
        """
        for name in names:
            if name not in self.state:
                self.new_state(name)
        arrays = (self.data, self.grad, *(self.state[name] for name in names))
        if self.data.size <= BLOCK or not self._flat or is_device_array(self.data):
            yield arrays
        else:
            for start in range(0, self.data.size, BLOCK):
                yield tuple(array[start : start + BLOCK] for array in arrays)

    def _whole(self, pieces: Sequence[Array]) -> Array:
        return flat_view(pieces) if self._flat else pieces[0]

    def _pieces(self, whole: Array) -> list[Array]:
        return list(views(whole, self._shapes)) if self._flat else [whole]


class ContiguousRuns:
    """The runs of one parameter group.

    If some parameters were joined, the runs are kept while the parameters have the same arrays and gradients.
    """

    def __init__(self, record_of: Callable[[Parameter], Record]) -> None:
        self._record_of = record_of
        self._seen: list[Array] = []
        self._runs: list[ContiguousRun] = []

    def forget(self) -> None:
        """Forget the runs, for example because states have been replaced. The next step finds them anew."""
        self._seen, self._runs = [], []

    def of(self, parameters: Sequence[Parameter]) -> list[ContiguousRun]:
        """Return runs over the parameters that have a gradient and at least one element."""
        live = [(p, p.data, p.grad) for p in parameters if p.grad is not None and p.data.size]
        arrays = [array for _, data, grad in live for array in (data, grad)]
        if self._seen and len(arrays) == len(self._seen) and all(map(is_, arrays, self._seen)):
            return self._runs
        self.forget()
        runs: list[list[tuple[Array, Array, Record]]] = []
        for p, data, grad in sorted(live, key=lambda entry: address(entry[1])):
            entry = data, grad, self._record_of(p)
            if runs and _follows(runs[-1][-1], entry):
                runs[-1].append(entry)
            else:
                runs.append([entry])
        made = [ContiguousRun(*zip(*run, strict=True)) for run in runs]
        if len(made) < len(live):
            # Runs keep their gradients in memory, so they are stored only if some parameters were joined.
            self._seen, self._runs = arrays, made
        return made


def _follows(left: tuple[Array, Array, Record], right: tuple[Array, Array, Record]) -> bool:
    (data, grad, record), (next_data, next_grad, next_record) = left, right
    return (
        are_adjacent(data, next_data)
        and are_adjacent(grad, next_grad)
        and record.keys() == next_record.keys()
        and record.get("step") == next_record.get("step")
    )


class Workspace:
    """Memory for intermediate results, kept from step to step."""

    def __init__(self) -> None:
        self._memory: dict[tuple[type, np.dtype[Any]], Array] = {}

    def like(self, x: Array) -> tuple[Array, Array]:
        """Return two uninitialised arrays of the shape and type of ``x``."""
        key = type(x), x.dtype
        memory = self._memory.get(key)
        if memory is None or memory.size < 2 * x.size:
            memory = self._memory[key] = array_namespace(x).empty(2 * x.size, dtype=x.dtype)
        return memory[: x.size].reshape(x.shape), memory[x.size : 2 * x.size].reshape(x.shape)
