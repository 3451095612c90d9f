"""Make the methods of torch's ProcessGroup from those of `mpiddp.torch.operations.Operations`.

``torch.distributed`` and torch's C++ pass lists of tensors and an options object. Such a call goes directly to the
method of `Operations`. Other calls pass torch's dispatcher first, as all calls of Gloo do: calls in another form
(overload), calls under a dispatch mode or a profiler, and calls with tensors that hold no data or that are of a
subclass with its own ``__torch_dispatch__``. Such a call is made on the twin, a process group written in C++. The twin
turns it into an operation of ``torch.ops.c10d``. A dispatch mode of this module, `_Carrier`, gets this operation after
all others that watch the dispatcher, and calls the method of `Operations`.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch._C import _distributed_c10d as c10d
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

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
        with _Carrier(self, name, function, _reduction((*args, *named.values())), kind):
            return getattr(self.twin, name)(*args, **named)

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


@untraced
class _Carrier(TorchDispatchMode):
    """Carries out the operation of ``torch.ops.c10d`` that a call of a group's twin becomes.

    It acts behind all other dispatch modes of the thread, which see the operation first. A mode gets the reduction as
    an object that it cannot read, so ``op`` is the reduction of the call.
    """

    def __init__(self, group: Any, name: str, function: Callable[..., Work | None], op: Any, kind: int) -> None:
        self._group, self._name, self._function, self._op, self._kind = group, name, function, op, kind

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True torch would import Dynamo to skip this class; `untraced` does so without that import

    def __enter__(self) -> Self:
        self._before = _set_modes(())
        _set_modes((self, *(mode for mode in self._before if not isinstance(mode, _Carrier))))
        return self

    def __exit__(self, *_: object) -> None:
        _set_modes(self._before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if behind := _set_modes(()):  # torch's own modes, such as that of fake tensors, can only be behind this one
            *others, mode = behind
            _set_modes((self, *others))
            try:
                return mode.__torch_dispatch__(func, types, args, kwargs)
            finally:
                _set_modes(behind)
        if types:
            return NotImplemented  # a subclass decides for itself
        schema = func._schema
        values = [*args, *(each.default_value for each in schema.arguments[len(args) :])]
        place = next((index for index, each in enumerate(schema.arguments) if each.name == "process_group"), None)
        if place is None or c10d.ProcessGroup.unbox(values[place]) is not self._group.twin or _needs_dispatch(args):
            return func(*args, **kwargs)  # torch has kernels for tensors without data
        positional = values[:place] if self._name != "barrier" else []  # a barrier has a tensor in torch only
        options = SimpleNamespace(reduceOp=self._op, timeout=None)
        for argument, value in zip(schema.arguments[place + 1 :], values[place + 1 :], strict=True):
            if argument.name in _OPTION_OF:
                option = timedelta(milliseconds=value) if argument.name == "timeout" else value
                setattr(options, _OPTION_OF[argument.name], option)
            elif argument.name not in _NOT_POSITIONAL:
                positional.append(value)
        if hasattr(options, "asyncOp"):
            positional.append(options)
        with record_function(f"mpiddp:{self._name}"):
            work = self._function(self._group, *positional) or Work([], (), Loan())
        work.kind = self._kind
        return (args[0], work.boxed()) if len(schema.returns) > 1 else work.boxed()


def _set_modes(modes: Iterable[Any]) -> list[Any]:
    """Set the dispatch modes of this thread, the last to act first; return those that were set before."""
    before = [torch._C._pop_torch_dispatch_stack(None) for _ in range(_modes())][::-1]
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)
    return before
