"""A torch process group that communicates through mpiddp.

``torch.distributed`` and torch's C++ call these methods, named as torch's functions; each lends its tensors to one
public function of mpiddp. A call that need not be asynchronous returns None: it is over. `dispatch.entry` brings calls
in other forms into this one. Wrong arguments are named as by Gloo, whose words programs may look for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout

from mpiddp import distributed as mpiddp
from mpiddp.mpi import recorder
from mpiddp.typing import Array

from . import cuda, default, dispatch
from .arrays import Loan, as_array
from .errors import RAISED, ArgumentError, expect, translate, translated
from .symmetric import symmetric_empty
from .work import Work, untraced

Tensors = Sequence[torch.Tensor]
T = TypeVar("T")

recorder.add_library(str(Path(torch.__file__).parent))  # the flight recorder shows the program's lines, not torch's

_COMBINE = {
    **dict.fromkeys(("SUM", "AVG", "PREMUL_SUM"), torch.add),
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""How a rank reduces several tensors of its own."""
_OPS = {
    int(getattr(ReduceOp.RedOpType, name)): getattr(mpiddp.ReduceOp, name) for name in _COMBINE if name != "PREMUL_SUM"
}


def _reduction(opts: Any) -> mpiddp.ReduceOp:
    """Return an option's reduction; SUM without options."""
    if opts is None:
        return mpiddp.ReduceOp.SUM
    op = opts.reduceOp
    return _OPS.get(int(op.op)) or mpiddp.ReduceOp.PREMUL_SUM(float(op.__getstate__()[1]))


_NO_TIMEOUT_OF_ITS_OWN = default_pg_timeout.total_seconds()


def _seconds(timeout: timedelta | None) -> float | None:
    """Return a timeout in seconds; None for torch's default or none at all.

    A call with one goes through mpiddp's queue, and raises; else mpiddp waits where waiting is shortest, and ends the
    job when the group's own 30 minutes are over.
    """
    found = None if timeout is None else timeout.total_seconds()
    return found if found is not None and 0 < found != _NO_TIMEOUT_OF_ITS_OWN else None


class Operations:
    """torch's communicating calls in a group of mpiddp; ``close`` takes the group when torch destroys its own."""

    def __init__(
        self, group: mpiddp.ProcessGroup, timeout: timedelta, close: Callable[[mpiddp.ProcessGroup], None]
    ) -> None:
        self.group = group
        self._close = close
        self.timeout = timeout
        self._timeout_s = _seconds(timeout)
        self._calls = 0
        self._coalesced: list[Work] | None = None

    # ---- names, and the little that torch asks a backend about

    def getBackendName(self) -> str:  # noqa: N802
        return "mpiddp"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory that the ranks of a node share; all ranks call it alike."""
        return symmetric_empty(size, dtype, self.group)

    @property
    def supports_splitting(self) -> bool:
        """False: torch must not split the group itself, but call ``new_group``."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """True: messages may be sent between `start_coalescing` and `end_coalescing`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout, self._timeout_s = timeout, _seconds(timeout)

    def _set_sequence_number_for_group(self) -> None:
        self._calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def shutdown(self) -> None:
        """End the group; all its ranks call it."""
        if not self.group.link.closed:
            with translated():
                self._close(self.group)

    def abort(self) -> None:
        """Give the group up without the other ranks; nothing is freed before the program ends."""

    # ---- how every call is made

    def _call(
        self,
        function: Callable[..., mpiddp.Work | None],
        arguments: tuple[Any, ...],
        outputs: Tensors,
        loan: Loan,
        options: Any,
        **named: Any,
    ) -> Work | None:
        """Call a function of mpiddp, and return torch's Work, or None where the call is over."""
        return self._calls_of(function, [arguments], outputs, loan, options, **named)

    def _calls_of(
        self,
        function: Callable[..., mpiddp.Work | None],
        calls: Sequence[tuple[Any, ...]],
        outputs: Tensors,
        loan: Loan,
        options: Any,
        lists: int = 1,
        **named: Any,
    ) -> Work | None:
        """Make several calls of one function, which end as one."""
        if named.get("op") is mpiddp.ReduceOp.AVG:
            self._sum_integers(calls, named, loan)
        if loan.device is not None:
            place, loan.device = loan.device, None
            with cuda.on_stream(place):
                return self._calls_of(function, calls, outputs, loan, options, lists, **named)
        self._calls += len(calls)
        limit_s = _seconds(getattr(options, "timeout", None)) or self._timeout_s
        try:
            if limit_s is None and options is not None and not options.asyncOp and self._coalesced is None:
                for arguments in calls:
                    function(*arguments, group=self.group, **named)
                loan.give_back()
                return None
            works = [function(*arguments, group=self.group, async_op=True, **named) for arguments in calls]
        except BaseException as error:
            loan.keep()
            if isinstance(error, RAISED):
                raise translate(error) from error
            raise
        return self._submitted(Work(works, outputs, loan, limit_s, lists))  # type: ignore[arg-type]

    def _sum_integers(self, calls: Sequence[tuple[Any, ...]], named: dict[str, Any], loan: Loan) -> None:
        """Turn an AVG of integers into a SUM that the loan divides; the first argument is the output."""
        if calls and calls[0][0].dtype.kind in "iu":
            named["op"] = mpiddp.ReduceOp.SUM
            if named.get("group_dst", self.group.rank()) == self.group.rank():
                for arguments in calls:
                    loan.divide(arguments[0], self.group.size())

    def _submitted(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def end_coalescing(self, device: Any = None) -> Work:
        """Return one Work for what has been submitted since `start_coalescing`."""
        collected, self._coalesced = self._coalesced or [], None
        return Work(collected, [each for work in collected for each in work.result()], Loan())

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # ---- collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work | None:
        expect(len(tensors) > 0, "requires non-empty tensor list")
        tensor, op = tensors[0], _reduction(opts)
        if len(tensors) > 1:
            _expect_alike(tensor, tensors)
            tensor = functools.reduce(_COMBINE[op.name], [each.detach() for each in tensors])
        loan, also = Loan(), tensors if len(tensors) > 1 else ()
        if not tensor.is_sparse:
            return self._call(mpiddp.all_reduce, (loan.output(tensor, also=also),), tensors, loan, opts, op=op)
        with translated(), torch.no_grad():  # a detached one would get indices and values of its own
            total = _sparse_sum(tensor, op, self.group)
            for each in tensors:
                each.copy_(total)
        return self._submitted(Work([], tensors, loan))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work | None:
        loan, op = Loan(), _reduction(opts)
        expect(len(tensors) > 0, "requires non-empty tensor list")
        expect(len({each.layout for each in tensors}) == 1, "invalid tensor layout at index: expected one layout")
        expect(tensors[0].layout is torch.strided, f"unsupported layout {tensors[0].layout}")
        expect(len({each.dtype for each in tensors}) == 1, "tensors must all have the same type")
        return self._calls_of(
            mpiddp.all_reduce, [(each,) for each in loan.outputs(tensors)], tensors, loan, opts, op=op
        )

    def broadcast(self, tensors: Tensors, opts: Any) -> Work | None:
        loan, root = Loan(), self._root(opts)
        tensor = _root_tensor(tensors, opts)
        others = [each for each in tensors if each is not tensor] if len(tensors) > 1 else []
        _expect_alike(tensor, others)
        if root == self.group.rank() and not others:
            x = loan.input(tensor, moved=True)
        else:
            x = loan.output(tensor, moved=True, also=others)
        return self._call(mpiddp.broadcast, (x,), tensors, loan, opts, group_src=root)

    def reduce(self, tensors: Tensors, opts: Any) -> Work | None:
        loan, root = Loan(), self._root(opts)
        tensor = _root_tensor(tensors, opts)
        _single(tensors, "tensor list")
        x = loan.output(tensor) if root == self.group.rank() else loan.input(tensor)
        return self._call(mpiddp.reduce, (x,), tensors, loan, opts, group_dst=root, op=_reduction(opts))

    def barrier(self, opts: Any = None) -> Work | None:
        return self._call(mpiddp.barrier, (), (), Loan(), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        with translated():
            mpiddp.monitored_barrier(self.group, getattr(timeout, "timeout", timeout), wait_all_ranks)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> Work | None:
        """``output_tensors[any][rank * inputs + index]``: all lists receive all inputs of all ranks."""
        count = len(input_tensors)
        expect(count > 0, "requires non-empty input tensor list")
        expect(len(output_tensors) == count, "requires input/output tensor lists to have the same length")
        _expect_alike(input_tensors[0], input_tensors)
        for mine in output_tensors:
            length = self.group.size() * count
            expect(len(mine) == length, f"invalid output tensor list: expected length {length}, got {len(mine)}")
            _expect_alike(input_tensors[0], mine)
        loan, calls = Loan(), []
        for index, tensor in enumerate(input_tensors):
            mine = list(zip(*output_tensors, strict=True))[index::count]
            outputs = [loan.output(first, moved=True, also=others) for first, *others in mine]
            calls.append((outputs, loan.input(tensor, moved=True)))
        flat = [each for mine in output_tensors for each in mine]
        return self._calls_of(mpiddp.all_gather, calls, flat, loan, opts, lists=count)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Work | None:
        """``output_lists[rank][index]``."""
        size = self.group.size()
        expect(len(output_lists) == size, f"output lists should be equal to world size {size}, got {len(output_lists)}")
        for mine in output_lists:
            expect(len(mine) == len(input_list), f"invalid output size: expected {len(input_list)}, got {len(mine)}")
            for index, (output, tensor) in enumerate(zip(mine, input_list, strict=True)):
                expect(output.shape == tensor.shape, f"invalid size of output tensor at index {index}")
                expect(output.dtype == tensor.dtype, f"invalid tensor type at index {index}")
        loan, calls, outputs = Loan(), [], []
        for index, tensor in enumerate(input_list):
            mine = [each[index] for each in output_lists]
            calls.append(([loan.output(each, moved=True) for each in mine], loan.input(tensor, moved=True)))
            outputs += mine
        return self._calls_of(mpiddp.all_gather, calls, outputs, loan, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work | None:
        return Operations.all_gather_single_coalesced(self, [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Make several calls that end as one."""
        loan = Loan()
        pairs = zip(outputs, inputs, strict=True)
        calls = [(loan.output(output, moved=True), loan.input(each, moved=True)) for output, each in pairs]
        return self._calls_of(mpiddp.all_gather_single, calls, outputs, loan, opts)

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any) -> Work | None:
        loan, root = Loan(), self._root(opts)
        tensor = _single(input_tensors, "input tensor list")
        mine = self._roots_list(root, output_tensors, "output", tensor)
        lists = [loan.output(each, moved=True) for each in mine] if mine else None
        x = loan.input(tensor, moved=True)
        return self._call(mpiddp.gather, (x, lists), mine, loan, opts, group_dst=root)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any) -> Work | None:
        loan, root = Loan(), self._root(opts)
        tensor = _single(output_tensors, "output tensor list")
        mine = self._roots_list(root, input_tensors, "input", tensor)
        lists = [loan.input(each, moved=True) for each in mine] if mine else None
        x = loan.output(tensor, moved=True)
        return self._call(mpiddp.scatter, (x, lists), output_tensors, loan, opts, group_src=root)

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank
        expect(0 <= root < self.group.size(), f"invalid root rank: {root} in a group of {self.group.size()}")
        return root

    def _roots_list(self, root: int, lists: Sequence[Tensors], role: str, tensor: torch.Tensor) -> Tensors:
        """Return the tensors that the root gathers or scatters, one for each rank; elsewhere none."""
        if root != self.group.rank():
            expect(not lists or not lists[0], f"requires empty {role} on non-root")
            return ()
        mine = _single(lists, f"{role} list")
        size = self.group.size()
        expect(len(mine) == size, f"Incorrect {role} list size {len(mine)}. {role.title()} list size should be {size}")
        _expect_alike(tensor, mine)
        return mine

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any) -> Work | None:
        loan = Loan()
        inputs = [loan.input(each) for each in _single(input_tensors, "input list")]
        x = loan.output(_single(output_tensors, "output tensor list"))
        return self._call(mpiddp.reduce_scatter, (x, inputs), output_tensors, loan, opts, op=_reduction(opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work | None:
        return Operations.reduce_scatter_single_coalesced(self, [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Make several calls that end as one."""
        loan, op = Loan(), _reduction(opts)
        pairs = zip(outputs, inputs, strict=True)
        calls = [(loan.output(output), loan.input(each)) for output, each in pairs]
        return self._calls_of(mpiddp.reduce_scatter_single, calls, outputs, loan, opts, op=op)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work | None:
        loan = Loan()
        outputs = [loan.output(each, moved=True) for each in output_tensors]
        inputs = [loan.input(each, moved=True) for each in input_tensors]
        return self._call(mpiddp.all_to_all, (outputs, inputs), output_tensors, loan, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work | None:
        loan = Loan()
        outputs = self._parts(loan.output(output, moved=True), output, output_split_sizes)
        inputs = self._parts(loan.input(input, moved=True), input, input_split_sizes)
        return self._call(mpiddp.all_to_all, (outputs, inputs), (output,), loan, opts)

    def _parts(self, flat: Array, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[Array]:
        """Cut an array into the parts of the ranks: so many rows of the tensor each."""
        rows, size = tensor.shape[0] if tensor.ndim else 1, self.group.size()
        if not splits:
            if rows % size:
                raise ArgumentError(f"Tensor's dim 0 ({rows}) does not divide equally across group size {size}")
            splits = [rows // size] * size
        if sum(splits) != rows or len(splits) != size:
            raise ArgumentError(f"Split sizes {list(splits)} doesn't match total dim 0 size {rows} of {size} ranks")
        length, parts, start = flat.size // rows if rows else 0, [], 0
        for split in splits:
            parts.append(flat[start * length : (start + split) * length])
            start += split
        return parts

    # ---- point to point

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        """``dst`` is a rank of the group."""
        loan = Loan()
        return self._message(mpiddp.isend, loan.input(tensors[0], moved=True), tensors, loan, tag, group_dst=dst)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        """``src`` is a rank of the group."""
        loan = Loan()
        return self._message(mpiddp.irecv, loan.output(tensors[0], moved=True), tensors, loan, tag, group_src=src)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        loan = Loan()
        return self._message(mpiddp.irecv, loan.output(tensors[0], moved=True), tensors, loan, tag)

    def _message(self, function: Any, x: Array, tensors: Tensors, loan: Loan, tag: int, **peer: int) -> Work:
        with translated(), contextlib.nullcontext() if loan.device is None else cuda.on_stream(loan.device):
            work = function(x, group=self.group, tag=tag, **peer)
        made = Work if function is mpiddp.isend else functools.partial(Received, self.group)
        return self._submitted(made([work], tensors, loan, self._timeout_s))

    # ---- older names

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    allreduce_sparse = allreduce


@untraced
class ProcessGroup(Operations, torch.distributed.ProcessGroup):
    """A group of mpiddp's as one of torch's.

    Since 2.15 torch also takes a Backend (`backend.Backend`), which this group has; but it hides a Backend's Works
    behind objects that can be waited for and not be asked.
    """

    def __init__(
        self,
        group: mpiddp.ProcessGroup,
        timeout: timedelta,
        close: Callable[[mpiddp.ProcessGroup], None],
        store: torch.distributed.Store,
    ) -> None:
        torch.distributed.ProcessGroup.__init__(self, group.rank(), group.size())
        Operations.__init__(self, group, timeout, close)
        self._name = self._description = ""
        self._backend: Any = None
        self._store = store

    def get_group_store(self) -> torch.distributed.Store:
        return self._store

    @functools.cached_property
    def twin(self) -> torch.distributed.ProcessGroup:
        """A group of C++, where calls begin that torch's dispatcher is to see (`dispatch`)."""
        made = torch.distributed.ProcessGroup(self._store, self.rank(), self.size())
        made._set_group_name(self._name)
        return made

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Return a group of these ranks of this one, which all call; None on other ranks."""
        if not ranks:
            raise ArgumentError(
                "Split ranks cannot be empty. Please provide a non-empty list of ranks to split the group."
            )
        with translated():
            chosen = [self.group.ranks[self.group.checked(rank)] for rank in ranks]
            part = mpiddp.new_group(chosen, timeout or self.timeout, use_local_synchronization=True, sort_ranks=False)
        if part is None:
            return None
        assert isinstance(part, mpiddp.ProcessGroup), "a member"
        made = ProcessGroup(part, timeout or self.timeout, default.free, self._store)
        made.setGroupName(group_name or f"{self._name}:split:{list(ranks)}")
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("groups of other jobs cannot join one of MPI: start all ranks in one job")

    def own(self, backend: Any) -> None:
        """Take the Backend that torch's tools ask for."""
        self._backend = backend
        kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
        for device in self._device_types:
            self._register_backend(device, kind, backend)
        self._set_default_backend(kind)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in ("cpu", "cuda") if each == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend or self


for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter", "alltoall"),
    *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
):
    if hasattr(torch.distributed.ProcessGroup, _name):  # some are newer
        setattr(ProcessGroup, _name, dispatch.entry(_name, getattr(Operations, _name)))


@untraced
class Received(Work):
    """A message; knows its sender by its rank in the group."""

    def __init__(self, group: mpiddp.ProcessGroup, works: Sequence[mpiddp.Work], *others: Any) -> None:
        super().__init__(works, *others)
        self._group = group
        self._sender = -1

    def _finish(self, error: Exception | None) -> None:
        (message,) = self._works
        super()._finish(error)
        if self._error is None:
            self._sender = self._group.group_rank(message.source_rank())

    def source_rank(self) -> int:
        return self._sender

    _source_rank = source_rank


def _sparse_sum(tensor: torch.Tensor, op: mpiddp.ReduceOp, group: mpiddp.ProcessGroup) -> torch.Tensor:
    """Return the sum of sparse tensors: every rank gets all indices and values."""
    if op is not mpiddp.ReduceOp.SUM:
        raise ArgumentError(f"unsupported reduction operation: sparse tensors can be reduced by SUM only, got {op}")
    mine = tensor.detach().coalesce()
    parts: list[Any] = [None] * group.size()
    mpiddp.all_gather_object(parts, (as_array(mine.indices().cpu()), as_array(mine.values().cpu())), group)
    indices = torch.cat([torch.from_numpy(part) for part, _ in parts], dim=1)
    values = torch.cat([torch.from_numpy(part) for _, part in parts])
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, device=tensor.device, check_invariants=False)
    return total.coalesce()


def _expect_alike(model: torch.Tensor, tensors: Tensors) -> None:
    for each in tensors:
        expect(each.layout is model.layout, f"invalid tensor layout: expected {model.layout}, got {each.layout}")
        expect(each.dtype == model.dtype, f"invalid tensor type: expected {model.dtype}, got {each.dtype}")
        expect(each.shape == model.shape, f"invalid tensor size: expected {list(model.shape)}, got {list(each.shape)}")


def _single(several: Sequence[T], what: str) -> T:
    expect(len(several) == 1, f"requires a single-element {what}, got {len(several)}")
    return several[0]


def _root_tensor(tensors: Tensors, opts: Any) -> torch.Tensor:
    index = opts.rootTensor
    expect(0 <= index < len(tensors), f"invalid root tensor: {index} of {len(tensors)}")
    return tensors[index]
