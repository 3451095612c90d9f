"""Make the methods of torch's ProcessGroup from those of `mpiddp.torch.operations.Operations`.

``torch.distributed`` and torch's C++ pass lists of tensors and an options object. Such a call goes directly to the
method of `Operations`. Other calls pass torch's dispatcher first, as all calls of Gloo do: calls in another form
(overload), calls under a dispatch mode or a profiler, and calls with tensors that hold no data. Such a call is made on
the twin, a process group written in C++. The twin turns it into an operation of ``torch.ops.c10d``. The dispatcher ends
at a kernel of this module, which calls the method of `Operations`.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d as c10d
from torch.autograd.profiler import record_function

from .arrays import Loan
from .work import Work, untraced

_OPTIONS = frozenset(each for name, each in vars(c10d).items() if name.endswith("Options") and name[:1] != "_")
_TENSOR = torch.Tensor
_PLAIN = _TENSOR.__torch_dispatch__
_KINDS = {
    "all_gather_single": "_ALLGATHER_BASE",
    "all_gather_single_coalesced": "ALLGATHER_COALESCED",
    "reduce_scatter_single": "_REDUCE_SCATTER_BASE",
    "reduce_scatter_single_coalesced": "REDUCE_SCATTER_TENSOR_COALESCED",
    "all_to_all_single": "ALLTOALL_BASE",
    "recv_anysource": "RECVANYSOURCE",
}
"""Methods whose entry in torch's enumeration ``OpType`` has another name than the method, with that entry."""
_OPTION_OF = {"root_rank": "rootRank", "root_tensor": "rootTensor", "async_op": "asyncOp", "timeout": "timeout"}
"""Arguments of operations in ``torch.ops.c10d`` that the methods get in an options object, with the name of the
attribute there."""
_NOT_POSITIONAL = ("reduce_op", "sparse_indices", "device_ids")
_modes = torch._C._len_torch_dispatch_stack
_profiled = torch.autograd._profiler_enabled


class _Call(NamedTuple):
    """A call that is passing torch's dispatcher. ``op`` is its reduction, which a kernel's arguments do not show."""

    twin: Any
    name: str
    function: Callable[..., Work | None]
    op: Any
    kind: int


class _Current(threading.local):
    call: _Call | None = None


_current = _Current()


def entry(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method ``name`` of a ProcessGroup. It calls ``function``, directly or at the end of the dispatcher."""
    kinds = c10d.OpType.__members__  # type: ignore[attr-defined]
    kind = int(kinds.get(_KINDS.get(function.__name__, name.upper()), kinds["UNKNOWN"]))
    by_options = "opts" in (getattr(c10d.ProcessGroup, name).__doc__ or "")
    place, types = (-1, _OPTIONS) if by_options else (0, {list})

    def call(self: Any, *args: Any, **named: Any) -> Any:
        if named and list(named) == ["opts"]:
            args, named = (*args, named["opts"]), {}
        usual = args and not named and type(args[place]) in types
        if usual and not _modes() and not _profiled() and not _needs_dispatch(args):
            work = function(self, *args)
            if work is not None:
                work.kind = kind
            return work
        before = _current.call
        op = _reduction((*args, *named.values()))
        _current.call = _Call(self.twin, name, functools.partial(function, self), op, kind)
        try:
            with _our_kernels(name):
                return getattr(self.twin, name)(*args, **named)
        finally:
            _current.call = before

    call.__name__, call.__doc__ = name, function.__doc__
    return untraced(call)


def _reduction(args: Iterable[Any]) -> Any:
    for each in args:
        if isinstance(each, c10d.ReduceOp):  # a RedOpType, too, counts as an instance
            return each if hasattr(each, "op") else c10d.ReduceOp(each)  # type: ignore[arg-type]
        if hasattr(each, "reduceOp"):
            return each.reduceOp
    return c10d.ReduceOp(c10d.ReduceOp.SUM)


def _needs_dispatch(args: tuple[Any, ...]) -> bool:
    """Return True if torch's dispatcher has to see a call, because of its first tensor.

    The tensor is of a subclass that has its own ``__torch_dispatch__``, or it holds no data (device "meta").
    """
    for each in args:
        while type(each) is list and each:
            each = each[0]
        if type(each) is _TENSOR:  # the usual case
            return each.is_meta
        if isinstance(each, _TENSOR):
            return type(each).__torch_dispatch__ is not _PLAIN or each.is_meta
    return False


_lock = threading.Lock()
_operations: dict[str, str] = {}
"""For each method, the operation of ``torch.ops.c10d`` that stands for it. `_kernel` learns it in the first call."""


@contextlib.contextmanager
def _our_kernels(name: str) -> Iterator[None]:
    """Replace torch's kernels of a method's operation by the kernels of this module while the block runs.

    If the kernels stayed, calls of other groups could deadlock. A kernel in Python holds the GIL while it passes
    another group's call to torch's kernel, which may wait for a lock. A thread of Gloo that frees a tensor holds that
    lock and waits for the GIL.
    """
    with _lock:
        kernels = _kernels()
    library = torch.library.Library("c10d", "IMPL")
    # torch warns of kernels that are overridden.
    with contextlib.nullcontext() if name in _operations else warnings.catch_warnings(action="ignore"):
        for operation, key, kernel in kernels:
            if operation == _operations.get(name, operation):
                library.impl(operation, kernel, key, with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@functools.cache
def _kernels() -> list[tuple[str, str, Callable[..., Any]]]:
    """Return the kernels of this module, each with its operation and dispatch key.

    Each kernel holds the kernel of torch that it replaces. Therefore the first call of this function has to come before
    `_our_kernels` replaces any.
    """
    found: list[tuple[str, str, Callable[..., Any]]] = []
    for full_name in torch._C._dispatch_get_all_op_names():
        schema = torch._C._get_schema(full_name, "") if full_name[:6] == "c10d::" else None
        for key in ("CPU", "CUDA", "SparseCPU", "SparseCUDA") if ".Work" in str(schema) else ():
            if torch._C._dispatch_has_kernel_for_dispatch_key(full_name, key):
                kernel = functools.partial(_kernel, schema, torch.library.get_kernel(full_name, key))
                found.append((full_name[6:], key, kernel))
    return found


def _kernel(schema: Any, original: Any, keyset: Any, *args: Any) -> Any:
    values = [*args, *(each.default_value for each in schema.arguments[len(args) :])]
    place = next(index for index, each in enumerate(schema.arguments) if each.name == "process_group")
    call = _current.call
    if call is None or c10d.ProcessGroup.unbox(values[place]) is not call.twin:
        return original.call_boxed(keyset, *values)
    _operations[call.name] = schema.name[6:]
    positional = values[:place] if call.name != "barrier" else []  # a barrier has a tensor in torch only
    options = SimpleNamespace(reduceOp=call.op, timeout=None)
    for argument, value in zip(schema.arguments[place + 1 :], values[place + 1 :], strict=True):
        if argument.name in _OPTION_OF:
            option = timedelta(milliseconds=value) if argument.name == "timeout" else value
            setattr(options, _OPTION_OF[argument.name], option)
        elif argument.name not in _NOT_POSITIONAL:
            positional.append(value)
    if hasattr(options, "asyncOp"):
        positional.append(options)
    with record_function(f"mpiddp:{call.name}"):
        work = call.function(*positional) or Work([], (), Loan())
    work.kind = call.kind
    return (args[0], work.boxed()) if len(schema.returns) > 1 else work.boxed()
